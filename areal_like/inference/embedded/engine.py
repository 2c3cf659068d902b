"""The thread that runs the decode loop, and the orders it takes between two tokens.

Other threads append to an inbox and set an event; everything that touches rows, cache or weights happens in the one
thread, between two steps. Finished requests leave through ``deliver``, one call per step.

The thread supervises itself: an exception inside a step fails every request and order in flight, is remembered as
:attr:`DecodeEngine.failure`, and ends the thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self, TypeVar

import torch

from areal_like.api.weights import InterruptMode
from areal_like.errors import InfrastructureError, ServerUnavailable, WeightUpdateError
from areal_like.inference.embedded.gate import Gate, GateState
from areal_like.inference.embedded.loop import DecodeLoop
from areal_like.inference.embedded.requests import Request

T = TypeVar("T")
_log = logging.getLogger(__name__)

#: seconds the thread may take to end its current step when it is closed
_CLOSE_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseState:
    """Where the gate stands and how many requests stand (or run) behind it."""

    paused: bool
    in_flight: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """``seconds_paused``: how long new prompts could not join or running answers stood still for this commit."""

    version: int
    seconds_paused: float
    interrupted_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """Totals since the start, and how many requests are ``running`` and ``queued`` now."""

    version: int
    paused: bool
    running: int
    queued: int
    commits: int
    interrupted_requests: int
    pause_seconds: float
    busy_seconds: float
    cache_bytes: int
    generated_tokens: int
    prompt_tokens: int
    prefills: int
    decode_steps: int
    decode_rows: int
    recomputed_tokens: int
    finished_requests: int
    aborted_requests: int
    broken_requests: int


class _Wait(StrEnum):
    """When an order is carried out: between the next two tokens, or once no answer is running."""

    NO = "no"
    PAUSE = "pause"
    COMMIT = "commit"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Order:
    act: Callable[[], Any]
    future: Future[Any]
    wait: _Wait


class DecodeEngine:
    """Runs a :class:`DecodeLoop`. A context manager: the thread lives inside ``with``."""

    def __init__(
        self,
        loop: DecodeLoop,
        *,
        deliver: Callable[[list[Request]], None],
        failed: Callable[[str], None] = lambda reason: None,
        threads: int = 1,
        version: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``deliver`` gets requests as they end and ``failed`` the reason of a failure, both in the loop's thread."""
        self._loop = loop
        self._deliver = deliver
        self._failed = failed
        self._threads = threads
        self._version = version
        self._now = now
        self._gate = Gate()
        self._inbox: deque[Request | _Order] = deque()
        self._wake = threading.Event()
        self._waiting_orders: list[_Order] = []
        self._idle = False
        self._door = threading.Lock()
        self._closing = False
        self._ended = False
        self._failure = ""
        self._paused_since: float | None = None
        self._pause_seconds = 0.0
        self._busy_seconds = 0.0
        self._commits = 0
        self._interrupted = 0
        self._thread = threading.Thread(target=self._run, name="decode-loop", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join(_CLOSE_TIMEOUT)

    # --- from any thread ----------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version that writes the next token."""
        return self._version

    @property
    def failure(self) -> str:
        """Why the loop ended, or empty."""
        return self._failure

    def submit(self, request: Request) -> None:
        """Queue a request; it comes back through ``deliver``.

        Raises:
            ServerUnavailable: the loop has ended or is ending.
        """
        self._put(request)

    def abort(self, chosen: Callable[[Request], bool]) -> Future[int]:
        """End the chosen requests with what they have; the number of them."""
        return self._order(lambda: self._loop.abort(chosen))

    def pause(self, mode: InterruptMode) -> Future[PauseState]:
        """Stop between two tokens, or after the last running answer (drain). Prompts queue meanwhile."""

        def act() -> PauseState:
            self._gate.pause(mode)
            if self._paused_since is None:
                self._paused_since = self._now()
            return self._pause_state()

        acted = self._order(act)
        return self._order(self._pause_state, _Wait.PAUSE) if mode is InterruptMode.DRAIN else acted

    def resume(self) -> Future[PauseState]:
        """Go on."""

        def act() -> PauseState:
            self._gate.resume()
            if self._paused_since is not None:
                self._pause_seconds += self._now() - self._paused_since
                self._paused_since = None
            self._carry_out_waiting(_Wait.PAUSE)
            return self._pause_state()

        return self._order(act)

    def commit(self, version: int, mode: InterruptMode, apply: Callable[[], None]) -> Future[Committed]:
        """Swap weights between two tokens: ``apply`` changes them in place, then ``version`` writes all tokens.

        A :class:`WeightUpdateError` of ``apply`` means that nothing changed: it is the future's, and generation goes
        on. Any other exception leaves weights of no version, and fails the engine. Cancelling the future while the
        order waits for running answers withdraws it. An explicit pause stays as it was.
        """
        if mode is not InterruptMode.DRAIN:
            return self._order(lambda: self._commit(version, mode, apply, self._now()))
        begun: list[float] = []

        def begin() -> None:
            begun.append(self._now())
            self._gate.begin_draining_commit()

        self._order(begin)
        return self._order(lambda: self._commit(version, mode, apply, begun[0]), _Wait.COMMIT)

    def statistics(self) -> EngineStatistics:
        """A snapshot."""
        pausing = 0.0 if self._paused_since is None else self._now() - self._paused_since
        return EngineStatistics(
            version=self._version,
            paused=self._gate.state is not GateState.OPEN,
            running=self._loop.running,
            queued=self._loop.queued + len(self._inbox),
            commits=self._commits,
            interrupted_requests=self._interrupted,
            pause_seconds=self._pause_seconds + pausing,
            busy_seconds=self._busy_seconds,
            cache_bytes=self._loop.cache.nbytes,
            **asdict(self._loop.counters),
        )

    def _order(self, act: Callable[[], T], wait: _Wait = _Wait.NO) -> Future[T]:
        future: Future[T] = Future()
        self._put(_Order(act=act, future=future, wait=wait))
        return future

    def _put(self, entry: Request | _Order) -> None:
        with self._door:
            if self._failure:
                raise InfrastructureError(f"the decode loop failed: {self._failure}")
            if self._ended or self._closing:
                raise ServerUnavailable("the server is closing")
            self._inbox.append(entry)
        if self._idle:  # setting an event costs as much as a whole request's bookkeeping
            self._wake.set()

    # --- in the loop's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            while not self._closing:
                self._turn()
        except Exception as error:
            # the supervision boundary of the thread: whatever went wrong, everyone who waits must hear of it
            _log.exception("the decode loop failed")
            self._failure = f"{type(error).__name__}: {error}"
        self._end_all(self._failure or "the server closed")
        if self._failure:
            self._failed(self._failure)

    def _turn(self) -> None:
        """Take what came, then write one token per running answer; wait if there is nothing to do."""
        self._take_inbox()
        self._run_drained_orders()
        if (self._gate.may_decode and self._loop.has_rows) or (self._gate.may_join and self._loop.has_waiting):
            started = self._now()
            self._loop.step(self._version, admit=self._gate.may_join)
            self._busy_seconds += self._now() - started
            self._hand_out()
        else:
            self._hand_out()
            self._wait_for_inbox()

    def _wait_for_inbox(self) -> None:
        self._idle = True  # from here on whoever fills the inbox wakes us; what came before is seen below
        if not self._inbox and not self._closing:
            self._wake.wait()
        self._idle = False
        self._wake.clear()

    def _take_inbox(self) -> None:
        while self._inbox:
            entry = self._inbox.popleft()
            if isinstance(entry, Request):
                self._loop.enqueue(entry)
            elif entry.wait is _Wait.NO:
                _carry_out(entry)
            else:
                self._waiting_orders.append(entry)

    def _run_drained_orders(self) -> None:
        if self._waiting_orders:
            for order in [o for o in self._waiting_orders if o.future.cancelled()]:
                self._forget(order)
        if not self._loop.has_rows:
            self._gate.drained()
            if self._waiting_orders:
                self._carry_out_waiting(_Wait.COMMIT)
                self._carry_out_waiting(_Wait.PAUSE)

    def _carry_out_waiting(self, wait: _Wait) -> None:
        for order in [o for o in self._waiting_orders if o.wait is wait]:
            self._forget(order)
            _carry_out(order)

    def _forget(self, order: _Order) -> None:
        self._waiting_orders.remove(order)
        if order.wait is _Wait.COMMIT:
            self._gate.end_draining_commit()

    def _commit(self, version: int, mode: InterruptMode, apply: Callable[[], None], begun: float) -> Committed:
        interrupted = self._loop.running
        apply()
        self._version = version
        if mode is InterruptMode.RECOMPUTE:
            self._loop.recompute()
        seconds = self._now() - begun
        self._commits += 1
        self._interrupted += interrupted
        if self._paused_since is None:
            self._pause_seconds += seconds
        return Committed(version=version, seconds_paused=seconds, interrupted_requests=interrupted)

    def _pause_state(self) -> PauseState:
        paused = self._gate.state is not GateState.OPEN
        return PauseState(paused=paused, in_flight=self._loop.running, version=self._version)

    def _hand_out(self) -> None:
        finished = self._loop.take_finished()
        if finished:
            self._deliver(finished)

    def _end_all(self, reason: str) -> None:
        with self._door:
            self._ended = True
            left = list(self._inbox)
            self._inbox.clear()
        orders = [*self._waiting_orders, *(e for e in left if isinstance(e, _Order))]
        requests = [*self._loop.take_finished(), *self._loop.requests, *(e for e in left if isinstance(e, Request))]
        for request in requests:
            if request.finished is None:
                request.error = reason
        self._deliver(requests)
        for order in orders:
            if order.future.set_running_or_notify_cancel():
                order.future.set_exception(InfrastructureError(reason))


def _carry_out(order: _Order) -> None:
    if not order.future.set_running_or_notify_cancel():
        return
    try:
        result = order.act()
    except WeightUpdateError as error:
        order.future.set_exception(error)
    except Exception as error:
        order.future.set_exception(InfrastructureError(f"{type(error).__name__}: {error}"))
        raise
    else:
        order.future.set_result(result)
