"""Where tensors lie in locked memory, who has it, and when it is given back."""

from __future__ import annotations

import mmap
import random
from collections import namedtuple
from itertools import pairwise

import psutil
import pytest
import torch

from areal_like.api.weights import TensorEntry
from areal_like.inference.vllm_plugin.arena import ALIGNMENT, Arena, lay_out
from areal_like.weights.digest import tensor_entry
from tests.unit.inference.vllm_plugin.host_memory import HostMemory

PAGE = 4096
SIZES = {"a": (3, 5), "b": (2000,), "c": (), "none": (0, 4), "large": (50, 60)}


def entries(**shapes: tuple[int, ...]) -> list[TensorEntry]:
    return [tensor_entry(name, torch.zeros(shape)) for name, shape in (shapes or SIZES).items()]


def never() -> bool:
    return False


def refused(*arguments: object, **named: object) -> None:
    raise OSError(12, "Cannot allocate memory")


@pytest.mark.parametrize("seed", range(20))
def test_tensors_lie_apart_aligned_and_within_slices(seed: int) -> None:
    chosen = random.Random(seed)
    slice_bytes = PAGE * chosen.choice([1, 2, 7])
    sizes = [chosen.choice([0, 2, 300, 4000, 4096, 5000, 3 * slice_bytes + 2]) for _ in range(60)]
    layout = lay_out(sizes, slice_bytes)
    ends = [offset + size for offset, size in zip(layout.offsets, sizes, strict=True)]
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    assert all(end <= following for end, following in zip(ends, layout.offsets[1:], strict=False))
    assert layout.total % PAGE == 0
    assert ends[-1] <= layout.total < ends[-1] + PAGE
    bounds = [*layout.cuts, layout.total]
    assert bounds[0] == 0
    assert all(cut % PAGE == 0 for cut in bounds)
    assert all(0 < end - start <= slice_bytes for start, end in pairwise(bounds))
    for offset, size in zip(layout.offsets, sizes, strict=True):
        parts = layout.parts(offset, size)
        assert sum(end - start for start, end in parts) == size
        assert len(parts) == 1 or size > slice_bytes, "a small tensor lies in two slices"
        for start, end in parts:
            assert len({sum(cut <= offset + byte for cut in layout.cuts) for byte in (start, max(start, end - 1))}) == 1


def test_it_stays_where_it_is_over_versions_and_is_locked_once() -> None:
    memory = HostMemory()
    arena = Arena(memory, slice_bytes=PAGE)
    places, registered = [], []
    for _ in range(3):
        lease = arena.lease(entries(), never)
        assert lease is not None
        found = {entry.name: lease.tensor(entry) for entry in entries() if entry.nbytes}
        assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
            name: shape for name, shape in SIZES.items() if name != "none"
        }
        places.append([tensor.data_ptr() for tensor in found.values()])
        registered.append(memory.registered)
        lease.release()
    assert places[0] == places[1] == places[2]
    assert registered[0] == registered[2] == len(memory.locked) > 1


def test_it_is_lent_to_one_at_a_time() -> None:
    arena = Arena(HostMemory())
    first = arena.lease(entries(), never)
    assert first is not None
    assert arena.lease(entries(), never) is None
    first.release()
    second = arena.lease(entries(), never)
    assert second is not None
    first.release()  # once more: it is no longer first's
    assert arena.lease(entries(), never) is None


def test_other_tensors_have_another_arena() -> None:
    memory = HostMemory()
    arena = Arena(memory)
    for shapes in (SIZES, {"a": (9000,)}):
        lease = arena.lease(entries(**shapes), never)
        assert lease is not None
        assert sum(memory.locked.values()) == lay_out([entry.nbytes for entry in entries(**shapes)]).total
        lease.release()


def test_tensors_without_bytes_need_none() -> None:
    assert Arena(HostMemory()).lease(entries(none=(0, 3)), never) is None


def test_pages_that_cannot_be_locked_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    memory = HostMemory(lockable=2 * PAGE)
    arena = Arena(memory, slice_bytes=PAGE)
    assert arena.lease(entries(), never) is None
    assert arena.lease(entries(), never) is None
    assert ["pages cannot be locked (out of memory)" in line for line in caplog.messages] == [True]
    assert not memory.locked


def test_a_host_without_room_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory()
    arena = Arena(memory)
    total = lay_out([entry.nbytes for entry in entries()]).total
    kind = namedtuple("kind", "available")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: kind(4 * total - 1))
    assert arena.lease(entries(), never) is None
    assert memory.registered == 0
    monkeypatch.setattr(psutil, "virtual_memory", lambda: kind(4 * total))
    assert arena.lease(entries(), never) is not None


def test_a_host_that_gives_no_such_piece_of_memory_is_asked_again_at_the_next_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have available what it does not promise: a limit on address space, or strict accounting."""
    memory = HostMemory()
    arena = Arena(memory, slice_bytes=PAGE)
    monkeypatch.setattr(mmap, "mmap", refused)
    for _ in range(2):
        assert arena.lease(entries(), never) is None
    assert memory.registered == 0
    monkeypatch.undo()
    lease = arena.lease(entries(), never)
    assert lease is not None
    with monkeypatch.context() as patched:  # of another layout: the memory there was is given back all the same
        lease.release()
        patched.setattr(mmap, "mmap", refused)
        assert arena.lease(entries(other=(3 * PAGE,)), never) is None
    assert not memory.locked
    assert arena.lease(entries(), never) is not None


def test_locking_that_is_broken_off_goes_on_where_it_was() -> None:
    memory = HostMemory()
    arena = Arena(memory, slice_bytes=PAGE)
    assert arena.lease(entries(), lambda: memory.registered == 2) is None
    assert memory.registered == 2
    assert arena.lease(entries(), never) is not None
    assert memory.registered == len(memory.locked) > 2


def test_closed_it_is_unlocked_when_the_last_has_returned_it() -> None:
    memory = HostMemory()
    arena = Arena(memory)
    lease = arena.lease(entries(), never)
    assert lease is not None
    arena.close()
    assert memory.locked
    lease.release()
    assert not memory.locked
    assert arena.lease(entries(), never) is None
