"""The command line is quick, light, and its shipped experiments load."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from areal_like.config.load import load_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def test_help_answers_quickly_and_without_torch() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = (
        "import sys\nfrom launcher.cli import main\ntry: main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "run|plan|check|serve|eval|doctor|export|report" in ended.stdout
    # processor seconds, so that a busy machine does not fail it
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_python_m_launcher_is_the_same_command() -> None:
    ended = subprocess.run([sys.executable, "-m", "launcher", "--version"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "areal-like 0.1.0\n")


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_every_shipped_experiment_loads(path: Path) -> None:
    load_config(path)


def test_importing_the_library_loads_nothing_heavy() -> None:
    code = "import areal_like, sys; sys.exit(bool({'torch', 'transformers', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
