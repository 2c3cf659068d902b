from __future__ import annotations

import hashlib

import pytest
import torch

from areal_like.weights.digest import byte_chunks, parse_dtype, tensor_digest, tensor_entry
from areal_like.weights.manifest import ITEM_BYTES


def test_digest_is_sha256_of_dtype_shape_and_little_endian_bytes() -> None:
    tensor = torch.tensor([[1.0, -2.0]])
    expected = hashlib.sha256(b"float32[1, 2]|" + bytes.fromhex("0000803f000000c0")).hexdigest()[:32]
    assert tensor_digest(tensor) == expected


def test_every_single_byte_counts() -> None:
    tensor = torch.zeros(5, dtype=torch.float32)
    digests = {tensor_digest(tensor)}
    raw = tensor.view(torch.uint8)
    for position in range(raw.numel()):
        raw[position] ^= 1
        digests.add(tensor_digest(tensor))
        raw[position] ^= 1
    assert len(digests) == 21


def test_same_bytes_of_another_dtype_or_shape_differ() -> None:
    bits = torch.arange(6, dtype=torch.int16)
    others = [bits, bits.view(torch.bfloat16), bits.view(torch.float16), bits.reshape(2, 3), bits.reshape(3, 2)]
    assert len({tensor_digest(t) for t in others}) == len(others)


def test_minus_zero_and_nan_payloads_are_content() -> None:
    assert tensor_digest(torch.tensor([0.0])) != tensor_digest(torch.tensor([-0.0]))
    nan = torch.tensor([float("nan")])
    other = nan.clone()
    other.view(torch.int32)[0] += 1
    assert tensor_digest(nan) != tensor_digest(other)
    assert tensor_digest(nan) == tensor_digest(nan.clone())


def test_memory_layout_does_not_matter() -> None:
    tensor = torch.randn(4, 6)
    assert tensor_digest(tensor.t().contiguous()) == tensor_digest(tensor.t())
    assert tensor_digest(torch.nn.Parameter(tensor)) == tensor_digest(tensor)


@pytest.mark.parametrize("name", sorted(ITEM_BYTES))
def test_every_dtype_that_may_travel_has_the_size_it_is_listed_with(name: str) -> None:
    tensor = torch.zeros(3, dtype=torch.uint8).to(parse_dtype(name))
    entry = tensor_entry("t", tensor)
    assert (entry.dtype, entry.nbytes) == (name, 3 * ITEM_BYTES[name])


def test_large_tensors_are_hashed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(100, dtype=torch.int16)
    whole = tensor_digest(tensor)
    monkeypatch.setattr("areal_like.weights.digest.CHUNK_BYTES", 7)
    assert [len(chunk) for chunk in byte_chunks(tensor)] == [7] * 28 + [4]
    assert tensor_digest(tensor) == whole


def test_scalar_and_empty_tensors_have_entries() -> None:
    scalar, empty = tensor_entry("s", torch.tensor(1.0)), tensor_entry("e", torch.empty(0, 3))
    assert (scalar.shape, scalar.nbytes) == ((), 4)
    assert (empty.shape, empty.nbytes) == ((0, 3), 0)
    assert list(byte_chunks(torch.empty(0, 3))) == []


def test_dtypes_that_cannot_travel_are_named() -> None:
    with pytest.raises(ValueError, match="complex64"):
        parse_dtype("complex64")
    with pytest.raises(ValueError, match="Tensor"):
        parse_dtype("Tensor")
