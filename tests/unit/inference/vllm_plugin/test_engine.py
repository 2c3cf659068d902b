"""Our engine's way through host memory into a GPU, around vLLM's own models and reload."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.mark.engines
@pytest.mark.timeout(300)
@pytest.mark.parametrize("room", [0, 200_000, 10**9])
@pytest.mark.parametrize("model", ["llama", "qwen2"])
@pytest.mark.parametrize("environment", [".venv-vllm", ".venv-vllm-0.26"])
def test_versions_are_staged_proved_and_loaded_in_place(environment: str, model: str, room: int) -> None:
    """``room``: bytes free on the device; a version has 250 kB."""
    python = ROOT / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {environment}")
    command = [str(python), "-m", "tests.unit.inference.vllm_plugin.engine_case", model, str(room)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert ended.stdout.splitlines()[-1:] == ["whole"], ended.stderr[-3000:]
