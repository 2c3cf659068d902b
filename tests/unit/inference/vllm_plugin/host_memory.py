"""A GPU's memory for tests of staging: host memory that does as the driver promises, and no more.

Copies are done when they are settled, from what the source holds then: whoever reads or reuses memory before is caught.
"""

from __future__ import annotations

import threading

import torch


class HostMemory:
    """:class:`DeviceMemory`. ``room``: bytes free on the "device"; ``lockable``: bytes whose pages may be locked."""

    def __init__(self, room: int = 0, lockable: int = 2**40) -> None:
        self.room, self.lockable = room, lockable
        #: what :meth:`empty` has before it says no, though ``free`` promises ``room``
        self.real_room = room
        self.locked: dict[int, int] = {}
        self.registered = self.given_back = 0
        self.blocks: list[torch.Tensor] = []
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._lock = threading.Lock()

    def free(self) -> int:
        return self.room

    def register(self, buffer: torch.Tensor) -> str:
        start = buffer.data_ptr()
        assert start % 4096 == 0
        assert all(start + buffer.nbytes <= at or at + size <= start for at, size in self.locked.items())
        if buffer.nbytes > self.lockable:
            return "out of memory"
        self.lockable -= buffer.nbytes
        self.locked[start] = buffer.nbytes
        self.registered += 1
        return ""

    def unregister(self, buffer: torch.Tensor) -> None:
        assert self.locked.pop(buffer.data_ptr()) == buffer.nbytes
        self.lockable += buffer.nbytes

    def empty(self, nbytes: int) -> torch.Tensor | None:
        with self._lock:
            if nbytes > self.real_room:
                return None
            self.real_room -= nbytes
            self.blocks.append(torch.zeros(nbytes, dtype=torch.uint8))
            return self.blocks[-1]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        start, end = source.data_ptr(), source.data_ptr() + source.nbytes
        touched = [(at, size) for at, size in list(self.locked.items()) if start < at + size and at < end]
        assert len(touched) <= 1, "one copy from two registrations"
        assert all(at <= start and end <= at + size for at, size in touched), "half of it is registered"
        with self._lock:
            if touched:
                self._pending.append((target, source))
            else:  # from pageable memory: done when it returns
                target.copy_(source)

    def settle(self) -> None:
        with self._lock:
            for target, source in self._pending:
                target.copy_(source)
            self._pending.clear()

    def give_back(self) -> None:
        assert not self._pending
        self.given_back += 1
        self.real_room += sum(block.nbytes for block in self.blocks)
        self.blocks.clear()

    def holds(self, tensor: torch.Tensor) -> str:
        """Where it lies: device, locked or pageable."""
        at = tensor.data_ptr()
        if any(block.data_ptr() <= at < block.data_ptr() + block.nbytes for block in self.blocks):
            return "device"
        return "locked" if any(start <= at < start + size for start, size in self.locked.items()) else "pageable"
