"""An RPC server on an asyncio loop."""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self

import zmq
import zmq.asyncio

from areal_like.errors import RpcError
from areal_like.rpc import security
from areal_like.rpc.codec import Frame
from areal_like.rpc.protocol import Answer, Ask, Reply, Request, decode_request, encode_reply

_LOG = logging.getLogger(__name__)

#: clients whose last reply is remembered; the longest silent one is forgotten first
MAX_CLIENTS = 1024
#: milliseconds that unsent replies may hold up closing
_LINGER_MS = 250


@dataclass(slots=True, kw_only=True)
class _Client:
    """What a server knows of one client: the number it last called with, and the reply once there is one."""

    number: int = 0
    route: bytes = b""
    reply: list[Frame] | None = None
    acknowledged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcServerStatistics:
    """Counts since the start. ``resends`` are calls that were answered from memory or were running already."""

    calls: int
    raised: int
    refused: int
    resends: int
    malformed: int
    running: int
    clients: int


@dataclass(slots=True, kw_only=True)
class _Counts:
    calls: int = 0
    raised: int = 0
    refused: int = 0
    resends: int = 0
    malformed: int = 0


@dataclass(slots=True, kw_only=True)
class _Open:
    """What exists only between entering and leaving."""

    context: zmq.asyncio.Context
    socket: zmq.asyncio.Socket
    authenticator: Any
    address: str
    turns: asyncio.Semaphore
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


def _report(task: asyncio.Task[None]) -> None:
    """Nobody awaits these tasks: an error in one is a fault of ours that must not pass in silence."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _LOG.error("%s failed", task.get_name(), exc_info=error)


class _Overdue(Exception):
    """The caller's deadline passed; told apart from a TimeoutError that a method raises itself."""


async def _within(deadline: float, work: Awaitable[Any]) -> Any:
    try:
        async with asyncio.timeout_at(deadline) as limit:
            return await work
    except TimeoutError as error:
        if limit.expired():
            raise _Overdue from error
        raise


class RpcServer:
    """Answers calls of ``methods`` by name, each request at most once.

    Coroutine functions are awaited on the loop and cancelled at the caller's deadline. Plain functions run in
    ``executor`` if there is one, else on the loop: give an executor when they take long. ``max_running`` = 1 runs one
    call at a time, in order of arrival.

    Use as ``async with RpcServer(bind, methods) as server``; ``server.address`` is what clients connect to.
    """

    def __init__(
        self,
        bind: str,
        methods: Mapping[str, Callable[..., Any]],
        *,
        keys: security.RunKeys | None = None,
        executor: Executor | None = None,
        max_running: int = 64,
    ) -> None:
        self._bind = bind
        self._methods = dict(methods)
        self._keys = keys
        self._executor = executor
        self._max_running = max_running
        self._instance = uuid.uuid4().hex
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        self._counts = _Counts()
        self._open: _Open | None = None

    @property
    def address(self) -> str:
        return self._opened().address

    def statistics(self) -> RpcServerStatistics:
        running = len(self._open.tasks) - 1 if self._open else 0
        counts = self._counts
        return RpcServerStatistics(
            calls=counts.calls,
            raised=counts.raised,
            refused=counts.refused,
            resends=counts.resends,
            malformed=counts.malformed,
            running=max(running, 0),
            clients=len(self._clients),
        )

    async def __aenter__(self) -> Self:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        # one call in flight per client bounds the queues; a ROUTER would drop replies at a high-water mark
        socket.set_hwm(0)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 10_000)
        try:
            address, authenticator = security.bind(socket, self._bind, self._keys)
        except BaseException:
            context.destroy(linger=0)
            raise
        self._open = _Open(
            context=context,
            socket=socket,
            authenticator=authenticator,
            address=address,
            turns=asyncio.Semaphore(self._max_running),
        )
        self._start(self._receive(), name=f"rpc receive {address}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened, self._open = self._opened(), None
        for task in opened.tasks:
            task.cancel()
        await asyncio.gather(*opened.tasks, return_exceptions=True)
        opened.socket.close(linger=_LINGER_MS)
        if opened.authenticator is not None:
            opened.authenticator.stop()
        opened.context.term()

    def _opened(self) -> _Open:
        if self._open is None:
            raise RuntimeError("this RpcServer is not open; use it as `async with RpcServer(...) as server`")
        return self._open

    def _start(self, coroutine: Any, *, name: str) -> None:
        tasks = self._opened().tasks
        task = asyncio.create_task(coroutine, name=name)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(_report)

    async def _receive(self) -> None:
        """Consumes the socket for ever: every message is answered, run, or counted as malformed."""
        opened = self._opened()
        while True:
            route, *frames = await opened.socket.recv_multipart(copy=False)
            try:
                request = decode_request([frame.buffer for frame in frames])
            except RpcError as error:
                self._counts.malformed += 1
                _LOG.warning("%s: dropped a message: %s", opened.address, error)
                continue
            await self._admit(route.bytes, request)

    async def _admit(self, route: bytes, request: Request) -> None:
        if request.ask is Ask.HELLO:
            hello = Reply(answer=Answer.HELLO, number=request.number, instance=self._instance)
            return await self._send(route, encode_reply(hello))
        if request.instance != self._instance:
            message = "this process was restarted since you greeted it; connect anew"
            return await self._refuse(route, request, message)
        client = self._clients.setdefault(request.client, _Client())
        self._clients.move_to_end(request.client)
        client.route = route
        if request.ask is Ask.ACKNOWLEDGE:
            if request.number == client.number:
                client.reply, client.acknowledged = None, True
        elif request.number < client.number or (request.number == client.number and client.acknowledged):
            await self._refuse(route, request, f"call {request.number} is over; the last was {client.number}")
        elif request.number == client.number:
            self._counts.resends += 1
            if client.reply is not None:
                await self._send(route, client.reply)
        else:
            client.number, client.reply, client.acknowledged = request.number, None, False
            self._forget_silent_clients()
            self._start(self._run(client, request), name=f"rpc {request.method}")

    def _forget_silent_clients(self) -> None:
        while len(self._clients) > MAX_CLIENTS:
            self._clients.popitem(last=False)

    async def _refuse(self, route: bytes, request: Request, message: str) -> None:
        self._counts.refused += 1
        reply = Reply(answer=Answer.REFUSED, number=request.number, instance=self._instance, message=message)
        await self._send(route, encode_reply(reply))

    async def _run(self, client: _Client, request: Request) -> None:
        """Run one call and remember its reply, for its client's resends."""
        reply = await self._reply_to(request)
        try:
            frames = encode_reply(reply)
        except (TypeError, OverflowError, ValueError) as error:
            frames = encode_reply(self._raised(request, error))
        if client.number == request.number:
            client.reply = frames
            await self._send(client.route, frames)

    async def _reply_to(self, request: Request) -> Reply:
        deadline = asyncio.get_running_loop().time() + request.seconds_left
        try:
            await _within(deadline, self._opened().turns.acquire())
        except _Overdue:
            return self._overdue(request)
        try:
            self._counts.calls += 1
            value = await self._call(request, deadline)
        except _Overdue:
            return self._overdue(request)
        except Exception as error:  # supervision boundary: whatever the method raised is the caller's to handle
            return self._raised(request, error)
        finally:
            if self._open is not None:
                self._open.turns.release()
        return Reply(answer=Answer.RESULT, number=request.number, instance=self._instance, value=value)

    async def _call(self, request: Request, deadline: float) -> Any:
        function = self._methods.get(request.method)
        if function is None:
            raise LookupError(f"no method {request.method!r}; known: {', '.join(sorted(self._methods))}")
        if inspect.iscoroutinefunction(function):
            return await _within(deadline, function(**request.arguments))
        if self._executor is None:
            return function(**request.arguments)
        # a thread cannot be cut: it keeps its turn until it is done, whatever the deadline
        call = partial(function, **request.arguments)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def _overdue(self, request: Request) -> Reply:
        self._counts.refused += 1
        message = f"its deadline of {request.seconds_left:.3g} s passed before it was done"
        return Reply(answer=Answer.REFUSED, number=request.number, instance=self._instance, message=message)

    def _raised(self, request: Request, error: BaseException) -> Reply:
        self._counts.raised += 1
        return Reply(
            answer=Answer.RAISED,
            number=request.number,
            instance=self._instance,
            remote_type=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
        )

    async def _send(self, route: bytes, frames: list[Frame]) -> None:
        await self._opened().socket.send_multipart([route, *frames], copy=False)
