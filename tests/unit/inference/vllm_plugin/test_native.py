"""Our buckets are received by the consumers of each installed vLLM."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.mark.engines
@pytest.mark.timeout(300)
@pytest.mark.parametrize("environment", [".venv-vllm", ".venv-vllm-0.26"])
def test_vllms_own_consumers_receive_what_we_pack(environment: str) -> None:
    python = ROOT / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {environment}")
    command = [str(python), "-m", "tests.unit.inference.vllm_plugin.native_case"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert ended.stdout.splitlines()[-1:] == ["whole"], ended.stderr[-3000:]
