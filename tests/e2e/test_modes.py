"""Modes are settings, not code paths: the same run at other settings, and the numbers that must come out the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from launched import LONG_ANSWERS, Workspace, rollouts_of, spans_of, steps_of, summary_of

from areal_like.config.paths import RunPaths

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
STEPS, BATCH, SAMPLES = 6, 4, 4


def _assert_replayed(paths: RunPaths) -> None:
    """The whole algorithm in one file, given the same batches, ends at the same parameters (float32, 1e-6)."""
    command = [sys.executable, str(ROOT / "benchmarks" / "sync_baseline.py"), "--replay", str(paths.root)]
    replay = subprocess.run(
        command, cwd=paths.root.parents[2], capture_output=True, text=True, timeout=120, check=False
    )
    assert replay.returncode == 0, replay.stdout + replay.stderr
    assert f"{STEPS} steps replayed" in replay.stdout


def _trained(paths: RunPaths, *, lost: Sequence[str] = ()) -> dict[str, int]:
    """Counters that balance, whatever the mode; returns them."""
    summary, last = summary_of(paths), steps_of(paths)[-1]
    groups: dict[str, int] = summary["groups"]
    assert summary["steps"] == STEPS
    assert groups["trained"] == STEPS * BATCH
    assert all(count == 0 for name, count in groups.items() if name not in ("trained", "cancelled", *lost))
    rollout = last["rollout"]  # taken before the last batch was released
    assert rollout["admitted"] == sum(rollout["groups"].values()) + rollout["live"] + BATCH
    trained = [line["group_id"] for lines in rollouts_of(paths).values() for line in lines]
    assert all(trained.count(group) == SAMPLES for group in set(trained))
    return groups


def test_eta_0_is_synchronous_and_equals_the_short_baseline(workspace: Workspace) -> None:
    paths = workspace.run("sync", "rollout.max_head_offpolicyness=0", "rollout.record_batches=true")
    _trained(paths)
    assert summary_of(paths)["lag_max"] == 0
    assert summary_of(paths)["multi_version_trajectories"] == 0
    for version, lines in rollouts_of(paths).items():
        assert all(line["lag"] == 0 for line in lines)
        assert {v for line in lines for v, _, _ in line["token_versions"]} == {version}
    generation, training = spans_of(paths, "generation"), spans_of(paths, "training")
    assert not any(max(g[0], t[0]) < min(g[1], t[1]) for g in generation for t in training)
    _assert_replayed(paths)


def test_two_ranks_two_servers_and_disk_learn_the_same_from_the_same_batches(workspace: Workspace) -> None:
    paths = workspace.run(
        "wide",
        "actor.backend=fsdp:d2",
        "rollout.backend=embedded:d2",
        "weights.transport=disk",
        "rollout.record_batches=true",
        # where a gradient is near 0, Adam divides rounding by rounding: the sums of two ranks, in another order than
        # one's, would then differ by up to 3e-6; this much eps (gradients are 1e-3 to 1e-1) leaves 1e-7
        "actor.optimizer.eps=1e-4",
        *LONG_ANSWERS,
    )
    _trained(paths)
    summary = summary_of(paths)
    assert summary["lag_max"] <= 2
    logs = {p.stem for p in paths.logs.iterdir()}
    assert {"inference-0", "inference-1", "train-0", "train-1"} <= logs
    assert not paths.weights.exists()  # what is to be kept is in checkpoints
    weights = paths.checkpoint(STEPS) / "model.safetensors"
    assert summary["weight_bytes_total"] == pytest.approx(2 * (STEPS + 1) * weights.stat().st_size, rel=0.05)
    _assert_replayed(paths)


def test_groups_that_grow_too_old_are_dropped_and_answers_recomputed(workspace: Workspace) -> None:
    paths = workspace.run("drop", "rollout.on_stale=drop", "rollout.interrupt=recompute", *LONG_ANSWERS)
    groups = _trained(paths, lost=("stale",))
    assert summary_of(paths)["lag_max"] <= 2
    assert summary_of(paths)["multi_version_trajectories"] > 0
    assert groups["stale"] == 0 or steps_of(paths)[-1]["rollout"]["expired_tokens"] >= 0


def test_draining_leaves_every_answer_to_one_version(workspace: Workspace) -> None:
    paths = workspace.run("drain", "rollout.on_stale=train", "rollout.interrupt=drain", *LONG_ANSWERS)
    _trained(paths)
    assert summary_of(paths)["multi_version_trajectories"] == 0
    # `train` bounds lag on average only: admission alone keeps it
    assert summary_of(paths)["lag_mean"] <= 2
