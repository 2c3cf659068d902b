"""Blocks of host memory that tensors are copied into, and that are used again and again.

Small tensors share a block, large ones take several. What was made for a tensor of a GPU is page-locked: its copies
come over at the bus's full speed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from areal_like.weights.buckets import ALIGNMENT

#: bytes of a block: large enough that starting a copy or a write costs nothing beside it
BLOCK_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStatistics:
    """Bytes in use now and at most, and bytes kept for the next tensors."""

    bytes_used: int
    peak_bytes_used: int
    bytes_kept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Bytes [start, start + len(data)) of a tensor. They are the holder's until it calls ``release``, once."""

    start: int
    data: memoryview
    release: Callable[[], None]


class _Block:
    """``used`` bytes of it are taken, by ``parts`` parts that were not released yet."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        with torch.inference_mode(False):  # an exporter's own mode must not stay with memory that outlives it
            self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.view = self.memory.numpy().data
        self.used = 0
        self.parts = 0


class HostBlocks:
    """At most ``budget`` bytes, and more only where waiting for a block would be waiting for ever.

    One thread takes, any thread gives back. ``changed`` guards every state here and tells of each return; whoever knows
    when nothing will be given back any more shares it.
    """

    def __init__(self, changed: threading.Condition, *, budget: int, block_bytes: int = BLOCK_BYTES) -> None:
        self._changed = changed
        self._block_bytes = block_bytes
        self._most = max(budget // block_bytes, 1)
        self._free: list[_Block] = []
        self._current: _Block | None = None
        self._used = self._peak = 0
        self._pinned = False

    def copy(self, flat: torch.Tensor, idle: Callable[[], bool]) -> tuple[Part, ...]:
        """A private copy of ``flat`` (bytes, one dimension, any device); it is whole when this returns.

        ``idle`` says, under ``changed``, that nobody is at work who could give a block back; what it raises ends the
        copy.
        """
        parts: list[Part] = []
        start = 0
        while start < flat.numel():
            block = self._block_with_room(flat.is_cuda, idle)
            count = min(flat.numel() - start, self._block_bytes - block.used)
            begin, end = block.used, block.used + count
            # not non_blocking: returns once the bytes have arrived, in the order of the current stream
            block.memory[begin:end].copy_(flat[start : start + count])
            with self._changed:
                block.used = -(-end // ALIGNMENT) * ALIGNMENT
                block.parts += 1
            parts.append(Part(start=start, data=block.view[begin:end], release=partial(self._release, block)))
            start += count
        return tuple(parts)

    def _block_with_room(self, pinned: bool, idle: Callable[[], bool]) -> _Block:
        with self._changed:
            block, self._current = self._current, None
            if block is None or block.used >= self._block_bytes:
                if block is not None and not block.parts:
                    self._give_back(block)
                self._changed.wait_for(lambda: self._free or self._used < self._most or idle())
                block = self._free.pop() if self._free else _Block(self._block_bytes, pinned=pinned)
                block.used = 0
                self._pinned |= pinned
                self._used += 1
                self._peak = max(self._peak, self._used)
            self._current = block
            return block

    def _release(self, block: _Block) -> None:
        with self._changed:
            block.parts -= 1
            if not block.parts and block is not self._current:
                self._give_back(block)
                self._changed.notify_all()

    def _give_back(self, block: _Block) -> None:
        self._used -= 1
        if self._used + len(self._free) < self._most:
            self._free.append(block)

    def reset(self) -> None:
        """Forget every part: their holders are gone."""
        with self._changed:
            block, self._current = self._current, None
            if block is not None and not block.parts:
                self._give_back(block)
            self._used = 0

    def statistics(self) -> BlockStatistics:
        with self._changed:
            return BlockStatistics(
                bytes_used=self._used * self._block_bytes,
                peak_bytes_used=self._peak * self._block_bytes,
                bytes_kept=len(self._free) * self._block_bytes,
            )

    def close(self) -> None:
        """Free the memory. Nothing may hold a part any more."""
        self.reset()
        self._free.clear()
        if self._pinned:
            self._pinned = False
            _empty_host_cache()


def _empty_host_cache() -> None:
    """Give page-locked memory that nobody uses back to the system; torch 2.11 has no public name for it."""
    empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()
