"""Run by ``test_digest_kernel.py`` under Triton's interpreter: the kernel's sums against plain torch, on the CPU."""

from __future__ import annotations

import sys

import torch

from areal_like.weights import digest_kernel
from areal_like.weights.device_digest import ROW_BYTES, DeviceDigests, agrees, device_digest
from areal_like.weights.digest_kernel import RowSums

CPU = torch.device("cpu")


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def many_at_once() -> None:
    """In one launch, at any place of a bucket, empty ones among them; and in another order of launches."""
    bucket = drawn(100_000).view(torch.uint8)
    tensors = [
        drawn(300, 77, seed=1), torch.empty(0, 4), bucket[16 : 16 + 5 * ROW_BYTES], drawn(), bucket[6:20],
        torch.full((5000,), -(2**63), dtype=torch.int64), drawn(64, 513, seed=2).t(), bucket[1:4],
    ]  # fmt: skip
    digests = DeviceDigests(CPU, kernel=RowSums(CPU))
    digests.add(*tensors)
    digests.add(*tensors[:2])
    digests.add(tensors[1])
    plain = [device_digest(tensor) for tensor in tensors]
    assert digests.read() == (*plain, *plain[:2], plain[1])
    assert digests.read() == ()


def every_bit_shows() -> None:
    kernel = RowSums(CPU)
    zeros = torch.zeros(18 * ROW_BYTES + 7, dtype=torch.uint8)
    found = set()
    for at in (0, 3, ROW_BYTES, 16 * ROW_BYTES - 1, 16 * ROW_BYTES, 18 * ROW_BYTES + 6):
        for bit in (1, 128):
            changed = zeros.clone()
            changed[at] = bit
            digests = DeviceDigests(CPU, kernel=kernel)
            digests.add(changed)
            found.add(digests.read()[0])
    assert len(found) == 12


def plans_are_bounded() -> None:
    kernel = RowSums(CPU)
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment, misc]
    digest_kernel._MOST_PLANS = 3  # type: ignore[misc]
    for size in range(1, 9):
        digests = DeviceDigests(CPU, kernel=kernel)
        digests.add(drawn(size))
        assert digests.read() == (device_digest(drawn(size)),)
    assert len(kernel._plans) <= 3


if __name__ == "__main__":
    assert agrees(RowSums(CPU), CPU)
    many_at_once()
    every_bit_shows()
    plans_are_bounded()
    sys.stdout.write("alike\n")
