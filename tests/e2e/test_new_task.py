"""The new task of the README, run as a user runs it: exactly that text, all processes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_FILE = re.compile(r"^`([\w.]+)`\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.e2e
def test_the_documented_task_trains(tmp_path: Path) -> None:
    from launcher.tiny_models import ArithmeticSettings, build_arithmetic

    build_arithmetic(tmp_path / "models" / "arithmetic", 1, ArithmeticSettings(clean_steps=2, noisy_steps=0))
    for name, text in _FILE.findall((ROOT / "README.md").read_text(encoding="utf-8")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "launcher", "run", "my_task.yaml"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    run = tmp_path / "runs" / "my_task" / "first"
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert summary["steps"] == 2
    assert summary["groups"]["trained"] == 4
    assert summary["groups"]["failed"] == 0
    lines = [json.loads(line) for line in (run / "rollouts" / "0.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {line["prompt"] for line in lines} <= {"12+3=", "40+9="}
    assert all(line["token_versions"] for line in lines)
