"""How long micro-batches took on their device, without waiting for it in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Rounds between two readings of a clock: the host's, or on CUDA that of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._rounds: list[tuple[Any, Any]] = []

    @contextmanager
    def round(self) -> Iterator[None]:
        started = self._now()
        yield
        self._rounds.append((started, self._now()))

    def seconds(self) -> list[float]:
        """Of every round since the last call. Waits for the last one to end on the device."""
        rounds, self._rounds = self._rounds, []
        if not self._cuda:
            return [end - start for start, end in rounds]
        for _, end in rounds[-1:]:
            end.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in rounds]

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
