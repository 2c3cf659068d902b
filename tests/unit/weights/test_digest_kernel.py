"""The fused digest: its kernel under Triton's interpreter, and that nothing is trusted that was not tried."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from areal_like.weights.device_digest import DeviceDigests, device_digest, tried, tried_kernel

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
ROW_WORDS = 2048


@pytest.mark.engines
@pytest.mark.timeout(120)
@pytest.mark.parametrize("environment", [".venv", ".venv-vllm", ".venv-vllm-0.26"])
def test_the_kernel_gives_the_digests_of_plain_torch(environment: str) -> None:
    python = ROOT / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {environment}")
    if subprocess.run([python, "-c", "import triton"], capture_output=True, check=False).returncode:
        pytest.skip(f"no triton in {environment}")
    command = [str(python), "-W", "error::RuntimeWarning", "-m", "tests.unit.weights.digest_kernel_case"]
    environ = os.environ | {"TRITON_INTERPRET": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=110, check=False)
    assert ended.stdout.splitlines()[-1:] == ["alike"], ended.stderr[-3000:]


def sums(parts: Sequence[torch.Tensor], columns: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What a kernel must give, another way: each part as one padded matrix of words."""
    found = []
    for part in parts:
        count = -(-part.numel() // (4 * ROW_WORDS))
        padded = torch.zeros(count * 4 * ROW_WORDS, dtype=torch.uint8)
        padded[: part.numel()] = part
        words = padded.view(torch.int32).view(count, ROW_WORDS).long()
        found.append(torch.stack([((words * columns[k]).sum(1) * rows[k, :count]).sum() for k in range(2)]))
    return torch.stack(found)


def test_a_kernel_that_agrees_is_used() -> None:
    kernel = tried(lambda: sums, CPU)
    assert kernel is sums
    tensors = [torch.arange(5000.0), torch.empty(0), torch.ones(3, dtype=torch.uint8)]
    digests = DeviceDigests(CPU, kernel=kernel)
    digests.add(*tensors)
    digests.add(tensors[0])
    assert digests.read() == tuple(device_digest(tensor) for tensor in [*tensors, tensors[0]])


def test_a_kernel_that_differs_or_fails_is_told_once_and_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def wrong(parts: Sequence[torch.Tensor], columns: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        found = sums(parts, columns, rows)
        found[-1, 1] ^= 1
        return found

    def broken() -> object:
        raise RuntimeError("no compiler")

    for make, said in ((lambda: wrong, "its digests differ"), (broken, "RuntimeError: no compiler")):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert tried(make, CPU) is None
        assert [said in record.getMessage() for record in caplog.records] == [True]


def test_other_devices_have_none() -> None:
    assert tried_kernel(CPU) is None
