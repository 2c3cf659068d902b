from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from areal_like.errors import ArealLikeError
from areal_like.observe.summary import GroupCounts, RunTally


def test_a_run_adds_up(tmp_path: Path) -> None:
    tally = RunTally()
    tally.published(pause_seconds=0.25, interrupted_requests=0, weight_bytes=100)
    tally.evaluated(0.4)
    for lags, reward in (([0, 0], 0.3), ([1, 2], 0.5), ([2, 0], 0.9)):
        tally.taken(lags=lags, multi_version_trajectories=len(lags))
        tally.trained(reward=reward, tokens=10)
        tally.published(pause_seconds=0.25, interrupted_requests=3, weight_bytes=100)
    tally.evaluated(0.7)
    tally.evaluated(0.95)
    groups = GroupCounts(trained=6, filtered=1, failed=2, stale=3, cancelled=4)
    summary = tally.summary(seconds=12.5, groups=groups, generated_tokens=99, extra={"seed": 1})
    path = tmp_path / "summary.json"
    summary.write(path)
    assert json.loads(path.read_text()) == {
        "seconds": 12.5,
        "steps": 3,
        "reward_first": 0.3,
        "reward_last": 0.9,
        "eval_before": 0.4,
        "eval_after": 0.95,
        "versions_published": 4,
        "lag_max": 2,
        "lag_mean": 0.833333,
        "groups": {"trained": 6, "filtered": 1, "failed": 2, "stale": 3, "cancelled": 4},
        "generated_tokens": 99,
        "trained_tokens": 30,
        "interrupted_requests": 9,
        "multi_version_trajectories": 6,
        "pause_seconds_total": 1.0,
        "weight_bytes_total": 400,
        "seed": 1,
    }
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_a_run_that_ended_before_its_first_step_has_a_summary_too(tmp_path: Path) -> None:
    summary = RunTally().summary(seconds=0.1, groups=GroupCounts(), generated_tokens=0)
    assert (summary.steps, summary.reward_first, summary.eval_before, summary.lag_mean) == (0, None, None, 0.0)
    summary.write(tmp_path / "s.json")


def test_one_evaluation_is_the_one_before() -> None:
    tally = RunTally()
    tally.evaluated(0.4)
    summary = tally.summary(seconds=1, groups=GroupCounts(), generated_tokens=0)
    assert (summary.eval_before, summary.eval_after) == (0.4, None)


def test_a_reward_that_is_no_number_is_null() -> None:
    tally = RunTally()
    tally.trained(reward=math.nan, tokens=1)
    summary = tally.summary(seconds=1, groups=GroupCounts(), generated_tokens=0)
    assert summary.to_dict()["reward_first"] is None


def test_a_summary_that_cannot_be_written_is_one_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    summary = RunTally().summary(seconds=1.0, groups=GroupCounts(), generated_tokens=0)
    (tmp_path / "summary.json").mkdir()
    for path in (tmp_path / "gone" / "summary.json", tmp_path / "summary.json"):
        with pytest.raises(ArealLikeError, match=r"summary\.json: cannot be written: "):
            summary.write(path)
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
