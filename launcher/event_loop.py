"""The event loop of a run: its signals, and an end that user code cannot put off.

Ctrl-C, SIGTERM, SIGHUP --> a wish to stop --> the run ends in order
              |                          (unless user code blocks the loop, or refuses its cancellation)
              +---- FORCE_AFTER --> children killed, sockets and shared memory removed, exit
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

import psutil
import uvloop

from areal_like.control.supervision import Stop
from areal_like.errors import ArealLikeError
from areal_like.rollout.failure import root_of
from launcher.leftovers import sweep

logger = logging.getLogger(__name__)

#: seconds from the first signal to the end by force; what is left of the 10 s that we promise is for cleaning up
FORCE_AFTER = 9.0
#: and from a repeated one
FORCE_AFTER_REPEATED = 5.0
#: seconds that killed children get to be gone
_KILL_WAIT = 0.5
#: seconds that a run which user code broke out of gets to end in order
_UNWIND_GRACE = 6.0
#: seconds that tasks left over at the end get to be cancelled
_TASKS_GRACE = 1.0


#: Ctrl-C, a scheduler's wish, a terminal that was closed
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(ArealLikeError):
    """The run was asked to end before it had begun to train, or to end at once; the message says which."""


def run_to_end(main: Callable[[Stop], Coroutine[Any, Any, None]], *, run_id: str) -> int:
    """Run ``main`` on uvloop, with Ctrl-C, SIGTERM and SIGHUP as wishes to stop; returns the exit status.

    Raises:
        ArealLikeError: user code raised KeyboardInterrupt or SystemExit in a task of its own, which stops the loop.
        Exception: what ``main`` raised, the first of it where it was a group.
    """
    stop = Stop()

    async def guarded() -> int:
        try:
            await main(stop)
        except Interrupted as error:
            logger.warning("ended by %s %s", stop.reason, error)
        except BaseExceptionGroup as group:
            raise root_of(group) from group
        return 128 + signal.Signals[stop.reason] if stop.asked else 0

    loop = uvloop.new_event_loop()
    with _signals(loop, stop, run_id):
        running = loop.create_task(guarded(), name="run")
        try:
            return loop.run_until_complete(running)
        except (KeyboardInterrupt, SystemExit) as error:  # never a signal's: those have handlers
            raise ArealLikeError(
                f"user code raised {type(error).__name__} in a task of its own, which ends the event loop; "
                f"raise an Exception instead"
            ) from error
        finally:
            _close(loop, running, run_id)


@contextmanager
def _signals(loop: asyncio.AbstractEventLoop, stop: Stop, run_id: str) -> Iterator[None]:
    """Handlers of Python's own, not the loop's: they run while user code blocks the loop, too.

    Their timers go on after the loop: a thread that user code left behind may still hold up the end of the process.
    """
    timers: list[threading.Timer] = []

    def heard(number: int, frame: FrameType | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: the run is over but for the end of this process
            loop.call_soon_threadsafe(stop.ask, signal.Signals(number).name)
        seconds = FORCE_AFTER_REPEATED if timers else FORCE_AFTER
        timers.append(threading.Timer(seconds, _end_by_force, (run_id, number, stop)))
        timers[-1].daemon = True
        timers[-1].start()

    before = {number: signal.signal(number, heard) for number in _STOPPING}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _close(loop: asyncio.AbstractEventLoop, running: asyncio.Task[int], run_id: str) -> None:
    """Cancel what is left, and close; ``asyncio.Runner`` would wait for ever for a task that refuses.

    Where user code broke out of the loop, the run itself is left, too: it ends in order first, if it does at all.
    """
    in_order = running.done() and (running.cancelled() or isinstance(running.exception(), Exception | None))
    try:
        if not running.done():
            _end_tasks(loop, {running}, _UNWIND_GRACE)
        _end_tasks(loop, asyncio.all_tasks(loop), _TASKS_GRACE)
        _run_to_end_of(loop, loop.shutdown_asyncgens())
    finally:
        loop.close()
        if not in_order:
            _kill_children()
            sweep(run_id)


def _end_tasks(loop: asyncio.AbstractEventLoop, tasks: set[asyncio.Task[Any]], seconds: float) -> None:
    """Cancel ``tasks`` and wait for them, however often user code breaks out of the loop meanwhile."""
    deadline = time.monotonic() + seconds
    for task in tasks:
        task.cancel()
    while (left := {task for task in tasks if not task.done()}) and time.monotonic() < deadline:
        _run_to_end_of(loop, asyncio.wait(left, timeout=max(0.0, deadline - time.monotonic())))
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # seen: the error that ended the run is the one to tell


def _run_to_end_of(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, object]) -> None:
    with suppress(KeyboardInterrupt, SystemExit):  # of user code's tasks
        loop.run_until_complete(work)


def _end_by_force(run_id: str, number: int, stop: Stop) -> NoReturn:
    """Runs on a thread of its own while the main thread is stuck, or waits for processes that are slow to end."""
    name = signal.Signals(number).name
    sys.stderr.write(
        f"areal-like: {name}: the run had ended; processes that were still busy were killed, and nothing is lost\n"
        if stop.work_ended
        else f"areal-like: {name} was not followed in time, as user code blocks the event loop, a thread, or its own "
        f"cancellation; ended by force\n"
    )
    sys.stderr.flush()
    _kill_children()
    sweep(run_id)
    os._exit(128 + number)


def _kill_children() -> None:
    children = psutil.Process().children(recursive=True)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=_KILL_WAIT)
