"""Sees the buckets of weights that this process broadcasts: how long they take, and when one is on its way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from areal_like.weights import nccl
from areal_like.weights.transports import collective
from areal_like.weights.transports.nccl import WARM_UP_BYTES

#: seconds after a bucket was handed over until ``on_fatal`` is called: it is on its way then
_MOMENT = 0.0005


@dataclass(slots=True)
class Broadcasts:
    """Those since :meth:`restart`. ``on_fatal`` is called once, when bucket ``fatal`` of them leaves."""

    count: int = 0
    began: float = 0.0
    ended: float = 0.0
    fatal: int = 2
    on_fatal: Callable[[], None] | None = None
    timers: list[threading.Timer] = field(default_factory=list)

    def restart(self) -> None:
        self.count, self.began, self.ended = 0, 0.0, 0.0

    @property
    def seconds(self) -> float | None:
        """From the first bucket's departure to the last one's arrival; None where nothing was broadcast."""
        return self.ended - self.began if self.count and self.ended else None

    def leaving(self) -> None:
        if not self.count:
            self.began = time.perf_counter()
        self.count += 1
        if self.on_fatal is not None and self.count == self.fatal:
            self.timers.append(threading.Timer(_MOMENT, self.on_fatal))
            self.timers[-1].start()

    def arrived(self) -> None:
        if self.count:
            self.ended = time.perf_counter()


@contextmanager
def watched_broadcasts() -> Iterator[Broadcasts]:
    """Over NCCL, whose calls return before the bytes have arrived, and over gloo, whose calls do not."""
    seen = Broadcasts()
    communicator: Any = nccl.Communicator
    gpu, gpu_wait, cpu = communicator.broadcast, communicator.wait, collective._broadcast

    def gpu_broadcast(group: Any, tensor: Any, *arguments: Any, **named: Any) -> None:
        if tensor.numel() > max(WARM_UP_BYTES):
            seen.leaving()
        gpu(group, tensor, *arguments, **named)

    def wait(group: Any, *arguments: Any, **named: Any) -> None:
        gpu_wait(group, *arguments, **named)
        seen.arrived()

    def cpu_broadcast(group: Any, bucket: Any) -> None:
        seen.leaving()
        cpu(group, bucket)
        seen.arrived()

    communicator.broadcast, communicator.wait, collective._broadcast = gpu_broadcast, wait, cpu_broadcast
    try:
        yield seen
    finally:
        communicator.broadcast, communicator.wait, collective._broadcast = gpu, gpu_wait, cpu
