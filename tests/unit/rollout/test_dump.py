"""Rollout dumps: what a person finds in rollouts/<version>.jsonl."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from areal_like.api.trajectory import Batch, GroupTag, PromptId, Trajectory
from areal_like.rollout.dump import RolloutDump, version_spans
from areal_like.rollout.store import TrajectoryStore


class Letters:
    """A tokenizer of letters, that can be made to wait."""

    eos_token_id = pad_token_id = None

    def __init__(self) -> None:
        self.may_decode = threading.Event()
        self.may_decode.set()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        self.may_decode.wait()
        return "".join(chr(97 + token) for token in token_ids)


def batch_of(version: int, *, rows: int = 2) -> tuple[Batch, list[Trajectory]]:
    store = TrajectoryStore()
    tags = []
    for number in range(rows):
        row = Trajectory(
            token_ids=np.array([0, 1, 2, 3, 4], np.int32),
            loss_mask=np.array([0, 1, 1, 0, 1], np.int32),
            logprobs=np.array([0, -1, -1, 0, -1], np.float32),
            versions=np.array([-1, 2, 3, -1, 3], np.int32),
            reward=float(number),
            group_id="g",
            episode_id=f"e{number}",
        )
        tags.append(store.put(row))
    group = GroupTag(group_id="g", prompt=PromptId(epoch=1, index=7), attempt=0, stamp=2, trajectories=tuple(tags))
    return Batch(version=version, groups=(group,)), store.get([tag.key for tag in tags])


async def test_a_line_holds_prompt_text_reward_and_token_versions(tmp_path: Path) -> None:
    async with RolloutDump(tmp_path / "rollouts", Letters()) as dump:  # type: ignore[arg-type]
        dump.submit(*batch_of(4))
    first, second = (tmp_path / "rollouts" / "4.jsonl").read_text().splitlines()
    assert json.loads(first) == {
        "version": 4,
        "group_id": "g",
        "episode_id": "e0",
        "epoch": 1,
        "index": 7,
        "attempt": 0,
        "reward": 0.0,
        "lag": 2,
        "length": 5,
        "loss_tokens": 3,
        "prompt": "a",
        "text": "bcde",
        "token_versions": [[2, 1, 2], [3, 2, 3], [3, 4, 5]],
    }
    assert json.loads(second)["reward"] == 1.0
    assert [file.name for file in (tmp_path / "rollouts").iterdir()] == ["4.jsonl"]


async def test_a_slow_disk_costs_lines_and_neither_memory_nor_time(tmp_path: Path) -> None:
    letters = Letters()
    letters.may_decode.clear()
    async with RolloutDump(tmp_path, letters) as dump:  # type: ignore[arg-type]
        for version in range(10):
            dump.submit(*batch_of(version))
        assert dump.statistics().dropped == 8
        letters.may_decode.set()
    figures = dump.statistics()
    assert (figures.written, figures.failed, figures.lines) == (2, 0, 4)


async def test_the_number_of_rows_is_bounded(tmp_path: Path) -> None:
    async with RolloutDump(tmp_path, Letters(), max_rows=3) as dump:  # type: ignore[arg-type]
        dump.submit(*batch_of(0, rows=5))
    assert len((tmp_path / "0.jsonl").read_text().splitlines()) == 3


async def test_an_error_on_disk_is_counted_and_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "1.jsonl").mkdir()
    async with RolloutDump(tmp_path, Letters()) as dump:  # type: ignore[arg-type]
        dump.submit(*batch_of(1))
        dump.submit(*batch_of(2))
    assert (dump.statistics().failed, dump.statistics().written) == (1, 1)
    assert "rollout dump of version 1" in caplog.text


def test_spans_name_runs_of_written_tokens() -> None:
    assert version_spans(np.array([-1, -1, 5, 5, 6, -1, 6, 6], np.int32)) == [(5, 2, 4), (6, 4, 5), (6, 6, 8)]
    assert version_spans(np.array([0], np.int32)) == [(0, 0, 1)]
    assert version_spans(np.array([], np.int32)) == []
