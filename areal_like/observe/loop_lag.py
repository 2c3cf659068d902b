"""How late the event loop is, and what holds it up.

A callback that computes for seconds stops every timeout, heartbeat and reply of the process at once, and looks like a
network fault from outside. A task measures how late its timers fire. A thread notices *while* the loop is stuck and
logs the line it is stuck on, which the loop itself could only report afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from types import TracebackType
from typing import Self

_LOGGER = logging.getLogger(__name__)

#: frames of the stuck stack that are logged, innermost last
_SHOWN_FRAMES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLagStatistics:
    """Seconds by which timers fired late: of the last one, on average, and at most. ``alarms`` counts long blocks."""

    last: float
    mean: float
    largest: float
    alarms: int


class LoopLagMonitor:
    """Measures the lag of the running event loop; an async context manager.

    Args:
        interval: seconds between two measurements.
        alarm_after: seconds the loop may be stuck before a warning names the line that holds it; once per block.
    """

    def __init__(self, *, interval: float = 0.25, alarm_after: float = 1.0) -> None:
        self._interval = interval
        self._alarm_after = alarm_after
        self._last = 0.0
        self._sum = 0.0
        self._count = 0
        self._largest = 0.0
        self._alarms = 0
        self._beaten = threading.Event()
        self._closing = threading.Event()
        self._task: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None

    async def __aenter__(self) -> Self:
        watched = threading.get_ident()
        self._task = asyncio.create_task(self._beat(), name="loop lag")
        self._thread = threading.Thread(target=self._watch, args=(watched,), name="loop-lag-watch", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._beaten.set()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._thread is not None:
            self._thread.join()  # it was just woken: it returns without waiting

    def statistics(self) -> LoopLagStatistics:
        mean = self._sum / self._count if self._count else 0.0
        return LoopLagStatistics(last=self._last, mean=mean, largest=self._largest, alarms=self._alarms)

    async def _beat(self) -> None:
        while True:
            due = time.monotonic() + self._interval
            await asyncio.sleep(self._interval)
            self._note(max(0.0, time.monotonic() - due))
            self._beaten.set()

    def _note(self, lag: float) -> None:
        self._last = lag
        self._sum += lag
        self._count += 1
        self._largest = max(self._largest, lag)

    def _watch(self, watched: int) -> None:
        """In a thread: wait for the next beat; when it is overdue, say where the loop's thread is."""
        while True:
            self._beaten.clear()
            if self._closing.is_set():  # looked at after the clear, so that the closing beat cannot be lost
                return
            if self._beaten.wait(self._interval + self._alarm_after):
                continue
            self._alarms += 1
            # the stack is for the log file: on a slow machine an import may hold the loop, and nobody is to blame
            _LOGGER.info("the event loop is stuck at:\n%s", _stack_of(watched))
            _LOGGER.warning(
                "event loop stuck for %.1f s; blocking work belongs in a thread or process; the log says where",
                self._alarm_after,
            )
            self._beaten.wait()


def _stack_of(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "  (its thread has ended)"
    return "".join(traceback.format_stack(frame)[-_SHOWN_FRAMES:]).rstrip()
