"""Groups of threads that stand in for NCCL's of processes: the same waits and deadlines, bytes in host memory."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from areal_like.weights.nccl import GroupBroken


class FakeWire:
    """One group's members, by rank: what was sent to them all, and who took how much of it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.members: set[int] = set()
        self.sent: list[bytes] = []
        self.taken: dict[int, int] = {}


class FakeGroup:
    """:class:`areal_like.weights.nccl.Group`."""

    def __init__(self, wire: FakeWire, rank: int, size: int, on_broadcast: Callable[[FakeGroup, int], None]) -> None:
        self.wire, self.rank, self.size = wire, rank, size
        self.broken = False
        self._on_broadcast = on_broadcast
        self._progress = time.monotonic()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        place = self.wire.taken[self.rank]
        self._on_broadcast(self, place)
        if self.broken:
            raise GroupBroken("aborted")
        self._progress = time.monotonic()
        raw = tensor.reshape(-1).view(torch.uint8)
        with self.wire.changed:
            if self.rank == src:
                self.wire.sent.append(raw.numpy().tobytes())
            else:
                self.wire.changed.wait_for(lambda: self.broken or len(self.wire.sent) > place)
                if self.broken:
                    raise GroupBroken("aborted")
                assert len(self.wire.sent[place]) == raw.numel(), "both sides must cut alike"
                if raw.numel():
                    raw.copy_(torch.frombuffer(bytearray(self.wire.sent[place]), dtype=torch.uint8))
            self.wire.taken[self.rank] = place + 1
            self.wire.changed.notify_all()

    def wait(self, stall: float) -> None:
        """As on a GPU, the sender knows of bytes that the others did not take."""
        if self.rank == 0:
            wanted = len(self.wire.sent)
            with self.wire.changed:
                done = self.wire.changed.wait_for(
                    lambda: self.broken or all(count >= wanted for count in self.wire.taken.values()), timeout=stall
                )
            if not done:
                self.abort()
                raise GroupBroken(f"a member of the group made no progress for {stall:g} s")
        if self.broken:
            raise GroupBroken("aborted")

    @contextmanager
    def watched(self, stall: float) -> Iterator[None]:
        over = threading.Event()
        self._progress = time.monotonic()

        def watch() -> None:
            while not over.wait(stall / 10):
                if time.monotonic() - self._progress > stall:
                    self.abort()
                    return

        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def abort(self) -> None:
        with self.wire.changed:
            self.broken = True
            self.wire.changed.notify_all()


class FakeNet:
    """All groups of one test."""

    def __init__(self) -> None:
        self.wires: dict[bytes, FakeWire] = {}

    def wire(self, unique_id: bytes) -> FakeWire:
        return self.wires.setdefault(unique_id, FakeWire())


class FakeGroups:
    """:class:`areal_like.weights.nccl.Groups` of one process, which a thread plays."""

    def __init__(
        self,
        net: FakeNet,
        gpu: str,
        *,
        version: str = "22800",
        timeout: float = 5.0,
        on_broadcast: Callable[[FakeGroup, int], None] = lambda group, place: None,
    ) -> None:
        self.net, self.device_name, self.version = net, gpu, version
        self._timeout, self._on_broadcast = timeout, on_broadcast
        self.joined: list[FakeGroup] = []

    def unique_id(self) -> bytes:
        return secrets.token_bytes(128)

    def join(self, unique_id: bytes, *, rank: int, size: int) -> FakeGroup:
        wire = self.net.wire(unique_id)
        group = FakeGroup(wire, rank, size, self._on_broadcast)
        self.joined.append(group)
        with wire.changed:
            wire.members.add(rank)
            wire.taken[rank] = 0
            wire.changed.notify_all()
            if not wire.changed.wait_for(lambda: len(wire.members) == size, timeout=self._timeout):
                raise GroupBroken("a member is missing or hangs")
        return group
