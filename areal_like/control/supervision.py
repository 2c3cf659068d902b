"""One piece of work, and the watchers whose failure ends it.

work ------------------> its result
watch processes ---x     the first failure cancels the work and is what the caller sees
stop asked for ----+     asks the work to end by itself, then cancels it
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from areal_like.rollout.failure import headline_of

logger = logging.getLogger(__name__)


class Stop:
    """A wish to end the run (Ctrl-C, SIGTERM). Wishing twice means: at once."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._urgent = asyncio.Event()
        self.reason = ""
        #: the work itself is over: what is left is to end processes, which loses nothing
        self.work_ended = False

    def ask(self, reason: str) -> None:
        if self._asked.is_set():
            self._urgent.set()
        self.reason = self.reason or reason
        self._asked.set()

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    async def wait(self) -> None:
        await self._asked.wait()

    async def wait_urgent(self) -> None:
        await self._urgent.wait()


async def supervise(work: Coroutine[Any, Any, None], watchers: tuple[Coroutine[Any, Any, object], ...]) -> None:
    """Run ``work`` until it ends; a watcher that ends first ends it too, and the work's CancelledError says of what.

    Raises:
        Exception: what the first watcher to fail raised, else what ``work`` raised. A watcher's failure comes first,
            since it is the cause: a dead process also breaks the calls that were waiting for it.
    """
    working = asyncio.create_task(work, name="work")
    watching = {asyncio.create_task(watcher, name=f"watcher {i}") for i, watcher in enumerate(watchers)}
    try:
        await asyncio.wait({working, *watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done() and working.exception() is not None:
            # a process that died breaks the work an instant before its exit is seen: give its watcher that instant
            await asyncio.wait(watching, timeout=_CAUSE_GRACE, return_when=asyncio.FIRST_COMPLETED)
        failed = [task for task in watching if task.done()]
        causes = [error for task in failed if (error := task.exception()) is not None]
        await _cancel({working, *watching}, headline_of(causes[0]) if causes else None)
        for task in failed:
            task.result()
        await working
    finally:
        await _cancel({working, *watching})


async def until_stopped(
    work: Coroutine[Any, Any, None], stop: Stop, *, ask_to_end: Callable[[], Awaitable[None]], grace: float
) -> bool:
    """Run ``work``; when ``stop`` is asked for, ask it to end and cancel it after ``grace`` seconds.

    Returns:
        True if it was stopped, False if it came to its own end.

    Raises:
        Exception: what ``work`` raised before it was asked to stop; what it raises then is logged.
    """
    working = asyncio.create_task(work, name="until stopped")
    asked = asyncio.create_task(stop.wait(), name="stop asked")
    urgent = asyncio.create_task(stop.wait_urgent(), name="stop at once")
    try:
        await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.asked:
            await working
            return False
        await ask_to_end()
        await asyncio.wait({working, urgent}, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        if working.done() and (error := working.exception()) is not None:
            logger.warning("while it was ending: %s", headline_of(error))
        return True
    finally:
        await _cancel({working, asked, urgent})


#: seconds between broken work and the exit that broke it
_CAUSE_GRACE = 0.5


async def _cancel(tasks: set[asyncio.Task[Any]], reason: str | None = None) -> None:
    for task in tasks:
        task.cancel(reason)
    await asyncio.gather(*tasks, return_exceptions=True)
