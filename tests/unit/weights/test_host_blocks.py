from __future__ import annotations

import threading

import pytest
import torch

from areal_like.weights.host_blocks import HostBlocks, Part


@pytest.fixture
def blocks() -> HostBlocks:
    """Room for two blocks of 128 bytes."""
    return HostBlocks(threading.Condition(), budget=256, block_bytes=128)


def nobody_works() -> bool:
    return True


def copy(blocks: HostBlocks, value: int, nbytes: int) -> tuple[Part, ...]:
    return blocks.copy(torch.full((nbytes,), value, dtype=torch.uint8), nobody_works)


def test_bytes_are_the_holders_until_they_are_released(blocks: HostBlocks) -> None:
    (first,), (second,) = copy(blocks, 1, 64), copy(blocks, 2, 64)
    (third,) = copy(blocks, 3, 128)
    first.release()  # its block holds the second as well
    (fourth,) = copy(blocks, 4, 128)
    assert [bytes(part.data) for part in (second, third, fourth)] == [b"\2" * 64, b"\3" * 128, b"\4" * 128]
    assert blocks.statistics().bytes_used == 3 * 128
    second.release()
    third.release()
    copy(blocks, 5, 256)
    assert bytes(fourth.data) == b"\4" * 128
    assert blocks.statistics().peak_bytes_used == 3 * 128


def test_parts_cover_a_tensor_in_order_and_lie_aligned(blocks: HostBlocks) -> None:
    copy(blocks, 9, 1)
    flat = torch.arange(200, dtype=torch.uint8)
    parts = blocks.copy(flat, nobody_works)
    assert [(part.start, len(part.data)) for part in parts] == [(0, 64), (64, 128), (192, 8)]
    assert b"".join(part.data for part in parts) == bytes(range(200))


def test_nothing_takes_no_block(blocks: HostBlocks) -> None:
    assert copy(blocks, 0, 0) == ()
    assert blocks.statistics().bytes_used == 0


def test_memory_beyond_the_budget_is_not_kept(blocks: HostBlocks) -> None:
    parts = copy(blocks, 1, 5 * 128)
    for part in parts:
        part.release()
    blocks.reset()
    found = blocks.statistics()
    assert (found.bytes_used, found.peak_bytes_used, found.bytes_kept) == (0, 5 * 128, 2 * 128)


def test_an_error_meanwhile_ends_the_copy(blocks: HostBlocks) -> None:
    def failed() -> bool:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        blocks.copy(torch.zeros(3 * 128, dtype=torch.uint8), failed)
    blocks.reset()
    assert bytes(b"".join(part.data for part in copy(blocks, 7, 200))) == b"\7" * 200


@pytest.mark.parametrize("torch_has", ["empty_host_cache", "_host_emptyCache", "nothing"])
def test_locked_memory_is_given_back_by_whichever_name_torch_has(
    blocks: HostBlocks, monkeypatch: pytest.MonkeyPatch, torch_has: str
) -> None:
    """torch 2.11 has the private one alone, later ones the public one."""
    given_back = []
    for owner, name in ((torch.accelerator, "empty_host_cache"), (torch._C, "_host_emptyCache")):
        monkeypatch.delattr(owner, name, raising=False)
        if name == torch_has:
            monkeypatch.setattr(owner, name, lambda: given_back.append(True), raising=False)
    blocks._pinned = True  # as after a CUDA tensor
    blocks.close()
    assert given_back == [True] * (torch_has != "nothing")
