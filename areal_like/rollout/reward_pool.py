"""A bounded pool of processes for reward functions, each of which can be killed and replaced at any moment.

    callers ──▶ queue (by age) ──▶ one task per worker ──▶ batch of calls ──▶ process
                   ▲                     │ reply: settle the oldest call of the batch
                   └── calls behind ─────┘ time limit or death: fail or retry it, kill, replace

A batch is answered in order, so the oldest unanswered call is the one that runs: a time limit hits exactly the call
that earned it, and those behind it go back to the queue, unharmed and in their old places. User code may write to the
socket, too: what is no answer to that call means a worker that cannot be trusted any more, as if it had died.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from areal_like.api.workflow import reward_fields
from areal_like.config.rewards import RewardsConfig
from areal_like.errors import ConfigError, InfrastructureError, RewardError
from areal_like.rollout.reward_worker import HEAD, Answer

#: calls sent to a worker at once, where calls are so short that the way there would cost more than the work
_WINDOW = 64
#: mean seconds of a call above which a worker gets one call at a time
_SHORT_CALL = 0.002
#: weight of the newest call in that mean
_MEMORY = 0.1
#: a loop that was blocked sees the time limit before the answer that is already there: one more look, in seconds
_GRACE = 0.1
_START_TIMEOUT = 60.0
#: workers in a row that may fail to start before the pool gives up
_START_TRIES = 3
#: workers that one call may take down with it (the first may have been killed by the system for another reason)
_CRASHES = 2
#: seconds a worker has to leave by itself at the end
_LEAVE_TIMEOUT = 1.0
#: longest answer line in bytes; tracebacks are cut well below it
_LONGEST_LINE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardStatistics:
    """``failures`` counts calls that ended in RewardError, ``timeouts`` those of them that ran past the limit.

    ``pending`` calls wait or run; ``seconds`` is the time spent in the user's function; ``restarts`` counts replaced
    workers.
    """

    calls: int
    failures: int
    timeouts: int
    pending: int
    seconds: float
    workers: int = 0
    restarts: int = 0


@dataclass(slots=True)
class RewardCounts:
    calls: int = 0
    failures: int = 0
    timeouts: int = 0
    restarts: int = 0
    seconds: float = 0.0


@dataclass(slots=True, order=True)
class _Call:
    """One call; ``serial`` gives its place in the queue, also when it comes back there."""

    serial: int
    frame: bytes = field(compare=False)
    reward: asyncio.Future[float] = field(compare=False)
    crashes: int = field(default=0, compare=False)


class _StartFailed(Exception):
    """A worker could not import the function, or did not get ready in time."""


class _WorkerDied(Exception):
    """The worker's end of the socket is closed, or something else than the worker writes to it."""


@dataclass(frozen=True, slots=True)
class _Worker:
    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def alive(self) -> bool:
        return self.process.returncode is None and not self.reader.at_eof()

    def send(self, calls: Sequence[_Call]) -> None:
        """Not awaited to the end: answers must be read meanwhile, or both sides could wait for each other."""
        self.writer.write(b"".join(HEAD.pack(len(call.frame), call.serial) + call.frame for call in calls))

    async def receive(self, limit: float) -> dict[str, Any]:
        """The next message.

        Raises:
            TimeoutError: none came within ``limit`` seconds.
            _WorkerDied: none will come.
        """
        try:
            try:
                line = await self._line(limit)
            except TimeoutError:
                line = await self._line(_GRACE)
            message = json.loads(line)
        except (ConnectionError, ValueError, RecursionError) as error:  # closed, cut, or written to by user code
            raise _WorkerDied from error
        if not isinstance(message, dict):
            raise _WorkerDied(f"no object: {line!r:.200}")
        return message

    async def _line(self, limit: float) -> bytes:
        async with asyncio.timeout(limit):
            return await self.reader.readline()


class RewardPool:
    """Runs a plain function in ``settings.workers`` processes. Satisfies :class:`~areal_like.api.RewardFunction`.

    Use as ``async with RewardPool(path, settings) as reward_fn``. At most ``settings.queue_size`` calls wait or run;
    further callers are held back. ``settings.timeout`` covers one call from the moment it runs. Output of the function
    goes to ``log_path``, or to our stderr.
    """

    def __init__(self, path: str, settings: RewardsConfig, *, log_path: Path | None = None) -> None:
        self._path = path
        self._settings = settings
        self._log_path = log_path
        self._queue: asyncio.PriorityQueue[_Call] = asyncio.PriorityQueue()
        self._room = asyncio.Semaphore(settings.queue_size)
        self._unsettled: dict[int, _Call] = {}
        self._counts = RewardCounts()
        self._mean_seconds = float("inf")
        self._alive = 0
        self._first_start = asyncio.Event()
        self._end: InfrastructureError | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Start the workers.

        Raises:
            ConfigError: none can be started, for example because the function's module does not import there.
        """
        log = None if self._log_path is None else self._stack.enter_context(self._log_path.open("ab"))
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        for number in range(max(1, self._settings.workers)):
            keeper = tasks.create_task(self._keep_worker(log), name=f"reward worker {number}")
            self._stack.callback(keeper.cancel)
        try:
            await self._first_start.wait()
        except asyncio.CancelledError:
            await self._stack.aclose()
            raise
        if self._end is not None:
            await self._stack.aclose()
            raise ConfigError(str(self._end)) from self._end
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop(InfrastructureError("the reward pool is closed"))
        await self._stack.aclose()  # not told of `error`: the task group would wrap it

    async def __call__(
        self, prompt: str, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], /, **data: Any
    ) -> float:
        """Score one completion; see :class:`~areal_like.api.RewardFunction`.

        Raises:
            RewardError: the function raised, ran past its limit, ended its process, or returned no finite number.
            InfrastructureError: the pool is closed, or its workers cannot be started any more.
        """
        async with self._room:
            if self._end is not None:
                raise InfrastructureError(str(self._end))
            frame = self._pickled((prompt, completions, list(prompt_ids), list(completion_ids)), reward_fields(data))
            self._counts.calls += 1
            call = _Call(self._counts.calls, frame, asyncio.get_running_loop().create_future())
            self._unsettled[call.serial] = call
            self._queue.put_nowait(call)
            try:
                return await call.reward
            finally:
                del self._unsettled[call.serial]

    def statistics(self) -> RewardStatistics:
        counts = self._counts
        return RewardStatistics(
            calls=counts.calls,
            failures=counts.failures,
            timeouts=counts.timeouts,
            restarts=counts.restarts,
            seconds=counts.seconds,
            pending=len(self._unsettled),
            workers=self._alive,
        )

    def _pickled(self, positional: tuple[Any, ...], keywords: dict[str, Any]) -> bytes:
        try:
            return pickle.dumps((positional, keywords), pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            self._counts.failures += 1
            raise RewardError(
                f"reward function {self._path}: its arguments cannot be sent to another process: {error}"
            ) from error

    async def _keep_worker(self, log: IO[bytes] | None) -> None:
        """Keep one worker alive; ends when the pool does, or after :data:`_START_TRIES` failed starts in a row."""
        failures = 0
        while self._end is None:
            try:
                async with _open_worker(self._path, log) as worker:
                    failures = 0
                    self._first_start.set()
                    self._alive += 1
                    try:
                        await self._serve(worker)
                    finally:
                        self._alive -= 1
                self._counts.restarts += 1
            except _StartFailed as error:
                failures += 1
                if failures == _START_TRIES or not self._first_start.is_set():
                    self._stop(InfrastructureError(f"reward function {self._path}: no worker can start: {error}"))

    async def _serve(self, worker: _Worker) -> None:
        """Consumes the queue, woken by calls and by answers; returns when ``worker`` has to be replaced."""
        while True:
            batch = await self._next_batch()
            if not worker.alive:  # it died idle, which is no call's fault
                return self._requeue(batch)
            worker.send(batch)
            while batch:
                try:
                    answer = Answer.of(await worker.receive(self._settings.timeout), batch[0].serial)
                except TimeoutError:
                    _kill(worker.process)
                    self._overdue(batch.popleft())
                    return self._requeue(batch)
                except (_WorkerDied, ValueError):  # gone, or no answer to this call
                    self._crashed(batch[0])
                    return self._requeue(batch)
                self._settle(batch.popleft(), answer)

    async def _next_batch(self) -> deque[_Call]:
        """At least one call; more only while calls are so short that sending them one by one would cost more."""
        batch = deque([await self._queue.get()])
        window = _WINDOW if self._mean_seconds < _SHORT_CALL else 1
        while len(batch) < window and not self._queue.empty():
            batch.append(self._queue.get_nowait())
        return deque(call for call in batch if not call.reward.done())

    def _requeue(self, calls: Sequence[_Call]) -> None:
        for call in calls:
            if not call.reward.done():
                self._queue.put_nowait(call)

    def _settle(self, call: _Call, answer: Answer) -> None:
        self._spent(answer.seconds)
        if call.reward.done():  # the caller was cancelled
            return
        if answer.reward is None:
            self._fail(call, f"reward function {self._path} failed: {answer.error}")
        else:
            call.reward.set_result(answer.reward)

    def _overdue(self, call: _Call) -> None:
        self._spent(self._settings.timeout)
        self._counts.timeouts += 1
        self._fail(
            call,
            f"reward function {self._path} ran longer than rewards.timeout = {self._settings.timeout:g} s; its process "
            f"was killed and replaced",
        )

    def _crashed(self, call: _Call) -> None:
        call.crashes += 1
        if call.crashes >= _CRASHES:
            self._fail(
                call,
                f"reward function {self._path}: its process died in this call, or wrote to our socket, "
                f"{_CRASHES} times in a row",
            )

    def _fail(self, call: _Call, message: str) -> None:
        if not call.reward.done():
            self._counts.failures += 1
            call.reward.set_exception(RewardError(message))

    def _spent(self, seconds: float) -> None:
        self._counts.seconds += seconds
        before = seconds if self._mean_seconds == float("inf") else self._mean_seconds
        self._mean_seconds = before + _MEMORY * (seconds - before)

    def _stop(self, reason: InfrastructureError) -> None:
        """Refuse further calls and end those that wait."""
        self._end = self._end or reason
        for call in self._unsettled.values():
            if not call.reward.done():
                call.reward.set_exception(InfrastructureError(str(self._end)))
        self._first_start.set()


@asynccontextmanager
async def _open_worker(path: str, log: IO[bytes] | None) -> AsyncIterator[_Worker]:
    """A worker that is ready; ended, if need be by force, on the way out.

    Raises:
        _StartFailed: it could not import ``path``, died, or was not ready in time.
    """
    ours, theirs = socket.socketpair()
    output = 2 if log is None else log.fileno()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "areal_like.rollout.reward_worker"),
            *(str(os.getpid()), str(theirs.fileno()), path),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # it can be killed with all that it started, and Ctrl-C does not reach it
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        )
    try:
        with ours:
            reader, writer = await asyncio.open_unix_connection(sock=ours.dup(), limit=_LONGEST_LINE)
        worker = _Worker(process, reader, writer)
        try:
            await _greet(worker)
            yield worker
        finally:
            writer.close()
    finally:
        await _leave(process)


async def _greet(worker: _Worker) -> None:
    try:
        message = await worker.receive(_START_TIMEOUT)
    except TimeoutError as error:
        raise _StartFailed(f"not ready within {_START_TIMEOUT:g} s; does its module do much work at import?") from error
    except _WorkerDied as error:
        raise _StartFailed("the process ended before it was ready") from error
    if message != {"ready": True}:
        raise _StartFailed(str(message.get("error", f"something else wrote to its socket: {message!r:.200}")))


async def _leave(process: asyncio.subprocess.Process) -> None:
    """An idle worker leaves when its socket closes; a busy one is killed after :data:`_LEAVE_TIMEOUT`."""
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_TIMEOUT):
                await process.wait()
    finally:
        _kill(process)
        await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    """End it and whatever it started, now."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
