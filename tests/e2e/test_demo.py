"""The demo as shipped, one seed: it learns what its warm start did not know, asynchronously, within its bounds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launched import spans_of

from areal_like.config.paths import RunPaths

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.demo_runs import run_demo  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

#: steps of ``configs/guess_cpu.yaml``, groups of a batch, and η
STEPS, BATCH, ETA = 150, 14, 2


def test_the_demo_goes_from_random_play_to_nine_in_ten(tmp_path: Path) -> None:
    run = run_demo(seed=1, models=tmp_path / "models", runs=tmp_path / "runs", trial="demo")
    summary = run.summary
    assert summary["eval_before"] <= 0.5
    assert summary["eval_after"] >= 0.9
    assert (summary["steps"], summary["versions_published"]) == (STEPS, STEPS + 1)
    assert summary["groups"] == {"trained": STEPS * BATCH, "filtered": 0, "failed": 0, "stale": 0, "cancelled": 0}
    assert 0 < summary["lag_mean"] <= summary["lag_max"] <= ETA  # asynchronous, and within the bound
    assert summary["multi_version_trajectories"] > 0
    assert summary["interrupted_requests"] > 0
    assert summary["generated_tokens"] >= summary["trained_tokens"] > 0
    assert 0 < summary["pause_seconds_total"] < 0.05 * summary["seconds"]
    paths = RunPaths(root=tmp_path / "runs" / "guess" / "demo")
    updates, requests = spans_of(paths, "training"), spans_of(paths, "generation")
    overlapped = sum(
        any(start < end_u and start_u < end for start, end, _ in requests) for start_u, end_u, _ in updates
    )
    assert overlapped > STEPS / 2  # generation goes on while the trainer works
    assert any(len(arguments["versions"]) == 2 for *_, arguments in requests)  # weights changed between two tokens
