"""Real engines train a real model: a few steps of the experiments in ``configs/``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_like.config.load import load_config

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_smollm2_trains_a_few_steps(engine: str, tmp_path: Path) -> None:
    experiment = ROOT / "configs" / f"smollm2_{engine}_cpu.yaml"
    config = load_config(experiment)
    if not (ROOT / (config.rollout.python or "")).exists() or not (ROOT / config.model.path).exists():
        pytest.skip(f"no environment or no model: make engines-{engine} smollm2")
    command = [sys.executable, "-m", "launcher", "run", str(experiment), "--plain", f"runs_dir={tmp_path}"]
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    folder = tmp_path / config.experiment_name / config.trial_name
    steps = [line for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "step" in line]
    assert [step["version"] for step in steps] == list(range(1, config.total_train_steps + 1))
    assert max(step["lag_max"] for step in steps) <= config.rollout.max_head_offpolicyness
    assert gaps(steps) and max(gaps(steps)) < 0.15  # mean |log-prob of the engine − of the trainer|, in bfloat16
    assert all(step["train"]["train/skipped_minibatches"] == 0 for step in steps)


def gaps(steps: list[dict[str, Any]]) -> list[float]:
    """Of steps that trained on tokens of the current version alone: lag has no part in them."""
    return [
        step["train"]["offpolicy/logprob_gap_mean"] for step in steps if step["train"]["offpolicy/fresh_fraction"] == 1
    ]
