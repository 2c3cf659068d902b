"""The device digest against plain integers of any size."""

from __future__ import annotations

import hashlib

import pytest
import torch

from areal_like.weights import device_digest as subject
from areal_like.weights.device_digest import PREFIX, DeviceDigests, device_digest, is_device_digest
from areal_like.weights.digest import tensor_digest

_ALL = 2**64 - 1
_STARTS = ((0x243F6A8885A308D3, 0xA4093822299F31D0), (0x13198A2E03707344, 0x082EFA98EC4E6C89))


def splitmix(seed: int, count: int) -> list[int]:
    """The published generator (https://prng.di.unimi.it/splitmix64.c), the last bit set."""
    numbers = []
    for step in range(1, count + 1):
        z = (seed + step * 0x9E3779B97F4A7C15) & _ALL
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _ALL
        numbers.append((z ^ (z >> 31)) | 1)
    return numbers


def by_hand(tensor: torch.Tensor) -> str:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    header = hashlib.sha256(f"{dtype}{list(tensor.shape)}|{len(raw)}".encode()).digest()
    padded = raw + bytes(-len(raw) % 8192)
    words = [int.from_bytes(padded[at : at + 4], "little", signed=True) for at in range(0, len(padded), 4)]
    text = PREFIX
    for half, (columns, rows) in enumerate(_STARTS):
        total = int.from_bytes(header[8 * half : 8 * half + 8], "big")
        table, factors = splitmix(columns, 2048), splitmix(rows, len(words) // 2048)
        for row, factor in enumerate(factors):
            part = words[2048 * row : 2048 * (row + 1)]
            total += factor * sum(number * word for number, word in zip(table, part, strict=True))
        text += f"{total & _ALL:016x}"
    return text


TENSORS = {
    "scalar": torch.tensor(0.5),
    "empty": torch.empty(0, 4),
    "small": torch.randn(3, 5, generator=torch.Generator().manual_seed(1)),
    "odd bytes": torch.arange(13, dtype=torch.uint8),
    "one row": torch.arange(1024, dtype=torch.int64) - 500,
    "rows and a rest": torch.randn(300, 77, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16),
    "large numbers": torch.full((5000,), -(2**63), dtype=torch.int64),
    "transposed": torch.randn(70, 80, generator=torch.Generator().manual_seed(3)).t(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_it_is_the_sum_that_it_says(name: str) -> None:
    assert device_digest(TENSORS[name]) == by_hand(TENSORS[name])


def test_parts_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(100, 1024, generator=torch.Generator().manual_seed(4))
    whole = device_digest(tensor)
    monkeypatch.setattr(subject, "_CHUNK_ROWS", 3)
    assert device_digest(tensor) == whole


def test_where_a_tensor_lies_makes_no_difference() -> None:
    """In a packed bucket words need not lie at multiples of eight bytes."""
    packed = torch.zeros(50_002, dtype=torch.uint8)
    tensor = torch.randn(2500, 5, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    for offset in (0, 2, 4, 6, 8, 14):
        place = packed[offset : offset + tensor.nbytes]
        place.copy_(tensor.reshape(-1).view(torch.uint8))
        assert device_digest(place.view(torch.bfloat16).view(2500, 5)) == device_digest(tensor)


def test_every_change_of_a_bit_dtype_or_shape_shows() -> None:
    raw = torch.zeros(20_000, dtype=torch.uint8)
    found = {device_digest(raw)}
    for at in (0, 1, 7, 8, 8191, 8192, 19_999):
        for bit in (1, 128):
            changed = raw.clone()
            changed[at] = bit
            found.add(device_digest(changed))
    found |= {device_digest(raw.view(2, 10_000)), device_digest(raw.view(torch.bfloat16)), device_digest(raw[:-1])}
    assert len(found) == 1 + 14 + 3


def test_pairs_of_flips_do_not_cancel() -> None:
    """Of any bit, the highest of a word among them, which every odd factor maps onto itself."""
    for bit in range(32):
        found = set()
        for first, second in ((0, 1), (0, 5), (3, 2048), (2048, 4096), (7, 6000)):
            words = torch.zeros(8192, dtype=torch.int32)
            words[[first, second]] = torch.tensor(2**bit).to(torch.int32)
            found.add(device_digest(words))
        assert len(found | {device_digest(torch.zeros(8192, dtype=torch.int32))}) == 6


def test_words_and_rows_that_changed_places_show() -> None:
    words = torch.arange(4096, dtype=torch.int64)
    swapped, turned = words.clone(), words.view(4, 1024)[[1, 0, 2, 3]].reshape(-1)
    swapped[[3, 9]] = swapped[[9, 3]]
    assert len({device_digest(words), device_digest(swapped), device_digest(turned)}) == 3


def test_many_are_read_at_once_and_in_order() -> None:
    digests = DeviceDigests("cpu")
    digests.reserve(10**6)
    for tensor in TENSORS.values():
        digests.add(tensor)
    assert digests.read() == tuple(device_digest(tensor) for tensor in TENSORS.values())
    assert digests.read() == ()


def test_the_kind_is_told_by_its_beginning() -> None:
    tensor = TENSORS["small"]
    sha, ours = tensor_digest(tensor), device_digest(tensor)
    assert not is_device_digest(sha)
    assert is_device_digest(ours)
    assert tensor_digest(tensor, like=ours) == ours
    assert tensor_digest(tensor, like=sha) == sha
