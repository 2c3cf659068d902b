"""Host memory for one version, kept over versions, its pages locked: a GPU copies from it at the speed of its bus.

A version that is being staged, or waits to be loaded, has the arena on *lease*; whoever stages meanwhile does without.
Pages are locked once, slice by slice: other threads that ask the driver for something wait for one slice at most. A
copy must not cross from one slice into the next (CUDA refuses ranges that one registration does not cover), so tensors
lie within slices; what is larger than a slice is copied in :meth:`Lease.parts`.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil
import torch

from areal_like.api.weights import TensorEntry
from areal_like.inference.vllm_plugin.device_memory import DeviceMemory
from areal_like.weights.digest import parse_dtype

_LOG = logging.getLogger(__name__)
#: bytes: a legal start for any dtype, and for the device's widest copies
ALIGNMENT = 256
#: bytes whose pages are locked at a time
SLICE_BYTES = 256 * 2**20
#: of the host's available memory, at most
_SHARE = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each tensor lies. ``cuts``: where slices begin, all at multiples of a page; the first at 0."""

    offsets: tuple[int, ...]
    cuts: tuple[int, ...]
    total: int

    def parts(self, offset: int, nbytes: int) -> tuple[tuple[int, int], ...]:
        """[start, end) of ``nbytes`` from ``offset`` on, slice by slice; relative to ``offset``."""
        inner = [cut - offset for cut in self.cuts if offset < cut < offset + nbytes]
        return tuple(zip([0, *inner], [*inner, nbytes], strict=True))


def lay_out(sizes: Sequence[int], slice_bytes: int = SLICE_BYTES) -> Layout:
    """Tensors of ``sizes`` bytes, in order: none crosses a slice's end but those that are larger than a slice.

    ``slice_bytes``: a multiple of a page.
    """
    offsets, cuts, end = [], [0], 0
    for size in sizes:
        offset = _up(end, ALIGNMENT)
        if offset > cuts[-1] and offset + size > cuts[-1] + slice_bytes:
            offset = _up(offset, mmap.PAGESIZE)
            cuts.append(offset)
        end = offset + size
        while end > cuts[-1] + slice_bytes:
            cuts.append(cuts[-1] + slice_bytes)
        offsets.append(offset)
    return Layout(tuple(offsets), tuple(cuts), _up(end, mmap.PAGESIZE))


class Lease:
    """The arena, for one version: one writer until it is staged, then nothing but readers, until :meth:`release`."""

    def __init__(self, buffer: torch.Tensor, layout: Layout, entries: Sequence[TensorEntry], arena: Arena) -> None:
        self._buffer, self._layout, self._arena = buffer, layout, arena
        self._offsets = dict(zip((entry.name for entry in entries), layout.offsets, strict=True))
        self._released = False

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        """The entry's place."""
        offset = self._offsets[entry.name]
        return self._buffer[offset : offset + entry.nbytes].view(parse_dtype(entry.dtype)).view(entry.shape)

    def parts(self, entry: TensorEntry) -> tuple[tuple[int, int], ...]:
        """Its bytes as ranges, each of which may be copied in one go."""
        return self._layout.parts(self._offsets[entry.name], entry.nbytes)

    def release(self) -> None:
        """Nobody reads or writes any more, devices included. Idempotent."""
        if not self._released:
            self._released = True
            self._arena.returned()


class Arena:
    """One worker's. Any thread may call."""

    def __init__(self, memory: DeviceMemory, *, slice_bytes: int = SLICE_BYTES) -> None:
        self._memory, self._slice_bytes = memory, slice_bytes
        self._lock = threading.Lock()
        self._leased = self._closed = self._refused = False
        self._layout: Layout | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._locked: list[torch.Tensor] = []

    def lease(self, entries: Sequence[TensorEntry], over: Callable[[], bool]) -> Lease | None:
        """For a version of ``entries``; at the first time, its pages are locked, unless it is ``over`` meanwhile.

        None: it is on lease, the host has no room, its pages cannot be locked, or it is over.
        """
        layout = lay_out([entry.nbytes for entry in entries], self._slice_bytes)
        with self._lock:
            if self._leased or self._closed or self._refused or not layout.total:
                return None
            self._leased = True
        try:
            if self._made(layout) and self._lock_pages(layout, over):
                return Lease(self._buffer, layout, entries, self)
        except BaseException:
            self.returned()
            raise
        self.returned()
        return None

    def returned(self) -> None:
        """By a lease."""
        with self._lock:
            self._leased = False
            if self._closed:
                self._free()

    def close(self) -> None:
        """No more leases; the pages are unlocked now, or when the last lease ends."""
        with self._lock:
            self._closed = True
            if not self._leased:
                self._free()

    def _made(self, layout: Layout) -> bool:
        """There is a buffer for ``layout``. The caller has the lease."""
        if self._layout == layout:
            return True
        self._free()
        available = psutil.virtual_memory().available
        if layout.total > available // _SHARE:
            _LOG.info(
                "weights are staged in pageable memory: %d MiB are more than a quarter of the %d MiB available",
                layout.total >> 20,
                available >> 20,
            )
            return False
        try:
            buffer = _pages(layout.total)
        except OSError as error:  # a limit of this process, or of what may be promised to all
            _LOG.info("weights are staged in pageable memory: no %d MiB in one piece (%s)", layout.total >> 20, error)
            return False
        self._layout, self._buffer = layout, buffer
        return True

    def _lock_pages(self, layout: Layout, over: Callable[[], bool]) -> bool:
        """Every slice is registered; those that are already stay so."""
        bounds = list(zip(layout.cuts, [*layout.cuts[1:], layout.total], strict=True))
        for start, end in bounds[len(self._locked) :]:
            if over():
                return False
            part = self._buffer[start:end]
            trouble = self._memory.register(part)
            if trouble:
                self._refused = True
                _LOG.warning(
                    "weights are staged in pageable memory, which takes longer: pages cannot be locked (%s); "
                    "`ulimit -l unlimited` may help",
                    trouble,
                )
                self._free()
                return False
            self._locked.append(part)
        return True

    def _free(self) -> None:
        locked, self._locked = self._locked, []
        for part in locked:
            self._memory.unregister(part)
        self._layout, self._buffer = None, torch.empty(0, dtype=torch.uint8)


def _pages(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] of whole pages, large ones if the system has them. A child of a fork has no part in them: it would
    leave the device another copy than the process.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        with suppress(OSError):
            memory.madvise(advice)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
