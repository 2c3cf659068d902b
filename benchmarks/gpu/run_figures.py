"""What the benchmarks tell of a finished run, worked out of its metrics."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.gpu.gpu_meter import GpuMeter
from benchmarks.gpu.live_runs import LiveRun

#: what is told of a run step by step; ``seconds`` since its start, at the end of the step
BY_STEP = (
    "seconds", "step_seconds", "wait_seconds", "update_seconds", "publish_seconds", "pause_seconds",
    "tokens_per_second", "interrupted_requests",
)  # fmt: skip


def step_figures(run: LiveRun, gpus: GpuMeter) -> dict[str, Any]:
    """What the benchmarks tell of one run: seconds, tokens/s and GPU shares, rewards, lags; seconds by step.

    Means are those of ``steady_steps`` (the numbers, from 1, of the first and last): the first fifth, which warms up,
    is left out. The end is not, where an asynchronous run generates less and lives off what it had generated before.
    ``whole_seconds`` is the sum of all steps, the first ones included.
    """
    first, last = run.steady()
    steps = run.steps[first + 1 : last + 1] or run.steps
    seconds = max(float(run.steps[last]["seconds"]) - float(run.steps[first]["seconds"]), 1e-9)
    generated = run.steps[last]["rollout"]["generated_tokens"] - run.steps[first]["rollout"]["generated_tokens"]
    means = {
        name: round(fmean(float(s[name]) for s in steps), 4)
        for name in ("step_seconds", "wait_seconds", "update_seconds", "publish_seconds", "pause_seconds")
    }
    names = ("eval_before", "eval_after", "lag_mean", "lag_max", "interrupted_requests", "multi_version_trajectories")
    return {
        "steps": len(run.steps),
        "steady_steps": [last + 2 - len(steps), last + 1],
        "whole_seconds": round(sum(float(s["step_seconds"]) for s in run.steps), 4),
        "seconds_per_step": round(seconds / max(last - first, 1), 4),
        **means,
        "publication": _means_of_parts(steps),
        "trainer_busy_share": round(means["update_seconds"] / max(means["step_seconds"], 1e-9), 3),
        "trainer_waiting_share": round(means["wait_seconds"] / max(means["step_seconds"], 1e-9), 3),
        "generated_tokens_per_second": round(generated / seconds, 1),
        "gpu_busy": gpus.busy(run.times[first], run.times[last]),
        "gpu_memory_gb": gpus.memory_gb(run.times[first], run.times[last]),
        "reward": [round(float(s["reward"] or 0.0), 4) for s in run.steps],
        "reward_last": round(fmean(float(s["reward"] or 0.0) for s in run.steps[-max(1, len(run.steps) // 6) :]), 4),
        "held_out": [
            [int(r["evaluation"]["version"]), r["evaluation"]["reward"], round(float(r["seconds"]), 2)]
            for r in run.evaluations
        ],
        "by_step": _by_step(run.steps),
        **{name: run.summary.get(name) for name in names},
        "wall_seconds": round(run.wall_seconds, 1),
        **{name: told for name, told in (("failed", run.failed), ("fell_back", run.fell_back)) if told},
    }


def _parts(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of a publication, as the steps name them (docs/engines.md); none in the metrics of older commits."""
    return list(dict.fromkeys(part for step in steps for part in step.get("publication", {})))


def _means_of_parts(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds; a part that a step lacks took none in it."""
    return {part: round(fmean(s.get("publication", {}).get(part, 0.0) for s in steps), 4) for part in _parts(steps)}


def _by_step(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Lists with an entry a step: a slow first step can be told from a steady state. ``publication``: by part."""
    found: dict[str, Any] = {
        name: [round(float(step[name]), 3) for step in steps] for name in BY_STEP if all(name in step for step in steps)
    }
    told = [step.get("publication", {}) for step in steps]
    found["publication"] = {part: [round(float(t.get(part, 0.0)), 3) for t in told] for part in _parts(steps)}
    return found
