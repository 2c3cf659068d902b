"""The benchmarks of weight updates run from end to end where there is no GPU, and check what they measure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]


def run(program: str, out: Path, *words: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / program), "--quick", "--engine", "embedded", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [*command, "--seconds", "300", "--out", str(out)], capture_output=True, text=True, env=environment, check=False
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_updates_on_one_device(tmp_path: Path) -> None:
    found = run("weight_sync.py", tmp_path / "found.json", "--transports", "shm", "ipc")
    updates = found["shapes"]["tiny"]["updates"]
    for mode in ("keep", "recompute"):
        reading = updates[f"shm, {mode}"]
        assert reading["right"] and reading["answers"]["whole"] and reading["running"] == 8
        assert 0 < reading["paused"] < reading["whole"]
        assert all(row["apart"] < 0.2 < row["apart_before"] for row in reading["readings"])  # it would show a fault
        assert "not_run" in updates[f"ipc, {mode}"]


def test_updates_and_deaths_between_two_devices(tmp_path: Path) -> None:
    found = run("two_gpu.py", tmp_path / "found.json", "--parts", "a", "c", "--modes", "keep")
    reading = found["a"]["tiny"]["updates"]["keep"]
    assert reading["right"] and reading["answers"]["whole"] and reading["broadcast"] > 0
    assert found["c"]["server_killed"]["held"]
    assert found["c"]["trainer_killed"]["held"]
