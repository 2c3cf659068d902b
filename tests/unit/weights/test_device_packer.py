"""Chunks and packed copies; vLLM's own consumer receives what we cut where its environment is here."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from areal_like.errors import WeightUpdateError
from areal_like.weights.chunks import plan_chunks
from areal_like.weights.device_digest import device_digest
from areal_like.weights.device_packer import DevicePacker

CPU = torch.device("cpu")


def cuts(sizes: list[int], limit: int) -> list[list[int]]:
    """vLLM's rule in its own words: take tensors until their sum exceeds the limit."""
    parts: list[list[int]] = []
    left = list(sizes)
    while left:
        part: list[int] = []
        while left and sum(part) <= limit:
            part.append(left.pop(0))
        parts.append(part)
    return parts


@pytest.mark.parametrize(
    "sizes",
    [[10], [5, 5, 5], [10, 1], [11, 1], [0, 0], [3, 0, 9, 0, 20, 1, 0], [10, 10, 10, 10], [1] * 50, [100, 1, 1, 100]],
)
def test_chunks_are_cut_as_vllm_cuts_them(sizes: list[int]) -> None:
    chunks = plan_chunks(sizes, 10)
    found = [sizes[chunk.first : chunk.last] for chunk in chunks]
    assert found == cuts(sizes, 10)
    for chunk, part in zip(chunks, found, strict=True):
        assert chunk.nbytes == sum(part)
        assert list(chunk.offsets) == [sum(part[:place]) for place in range(len(part))]


def tensors(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for number, shape in enumerate([(40, 25), (), (3,), (0, 5), (300, 11), (64, 64), (7, 1), (0,)]):
        yield f"t{number}", torch.randn(shape, generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize("bucket_bytes", [4096, 5000, 10**6])
def test_the_copy_is_what_was_given_and_its_memory_stays(bucket_bytes: int) -> None:
    packer = DevicePacker(CPU, bucket_bytes)
    places: list[int] = []
    for version in range(3):
        packed = packer.pack(tensors(version))
        assert [chunk.nbytes for chunk in packed.chunks] == [bucket.numel() for bucket in packed.buckets]
        whole = b"".join(bucket.numpy().tobytes() for bucket in packed.buckets)
        assert whole == b"".join(
            tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for _, tensor in tensors(version)
        )
        assert [entry.digest for entry in packed.entries] == [device_digest(tensor) for _, tensor in tensors(version)]
        found = [bucket.data_ptr() for bucket in packed.buckets]
        assert places in ([], found)
        places = found


def test_a_transposed_tensor_is_packed_as_it_reads() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).t()
    packed = DevicePacker(CPU, 4096).pack([("t", tensor)])
    assert torch.equal(packed.buckets[0].view(torch.float32).view(4, 3), tensor)
    assert packed.entries[0].shape == (4, 3)


def test_a_version_of_other_shapes_is_packed_too() -> None:
    packer = DevicePacker(CPU, 4096)
    packer.pack(tensors(1))
    larger = [("a", torch.arange(5000.0)), ("b", torch.arange(3.0))]
    packed = packer.pack(larger)
    assert [bucket.numel() for bucket in packed.buckets] == [20_000, 12]
    assert torch.equal(packed.buckets[0].view(torch.float32), larger[0][1])
    assert len(packer.pack([("b", torch.ones(2))]).buckets) == 1


def test_a_tensor_that_would_lie_askew_is_named() -> None:
    mixed = [("small", torch.ones(3, dtype=torch.bfloat16)), ("wide", torch.ones(4))]
    with pytest.raises(WeightUpdateError, match=r"'wide' of dtype float32 would lie at byte 6"):
        DevicePacker(CPU, 4096).pack(mixed)
    even = [("small", torch.ones(4, dtype=torch.bfloat16)), ("wide", torch.ones(4))]
    assert math.prod(DevicePacker(CPU, 4096).pack(even).buckets[0].shape) == 24


def test_a_failure_of_the_source_leaves_a_packer_that_works() -> None:
    packer = DevicePacker(CPU, 4096)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(4)
        raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError, match="a rank is gone"):
        packer.pack(broken())
    packed = packer.pack(tensors(1))
    assert [entry.digest for entry in packed.entries] == [device_digest(tensor) for _, tensor in tensors(1)]
