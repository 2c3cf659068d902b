"""An RPC client on an asyncio loop."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import zmq
import zmq.asyncio

from areal_like.rpc import security
from areal_like.rpc.protocol import (
    FIRST_RESEND,
    LAST_RESEND,
    Ask,
    Reply,
    Request,
    decode_reply,
    encode_request,
    no_answer,
    value_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcClientStatistics:
    calls: int
    resends: int


class RpcClient:
    """Calls methods of one server, one call in flight at a time; further calls wait for their turn.

    Use as ``async with RpcClient(address) as client``. Connecting succeeds at once; the first call waits for a server.
    """

    def __init__(self, address: str, *, keys: security.RunKeys | None = None) -> None:
        self._address = address
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            security.connect(self._socket, address, keys)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._client = uuid.uuid4().hex
        self._instance = ""
        self._number = 0
        self._resends = 0
        self._turn = asyncio.Lock()

    @property
    def address(self) -> str:
        return self._address

    def statistics(self) -> RpcClientStatistics:
        return RpcClientStatistics(calls=self._number, resends=self._resends)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._context.destroy(linger=0)

    async def call(self, method: str, *, timeout: float, **arguments: Any) -> Any:
        """Run ``method`` on the server with ``arguments`` and return what it returned.

        ``timeout`` in seconds covers everything, waiting for an earlier call of this client included.

        Raises:
            RemoteError: the method raised there; carries its type and traceback.
            RpcError: no answer in time, or the server refused (its deadline passed, or it was restarted meanwhile).
            TypeError: an argument cannot cross a socket.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        try:
            async with asyncio.timeout_at(deadline) as limit, self._turn:
                if not self._instance:
                    hello = Request(ask=Ask.HELLO, client=self._client, number=0)
                    self._instance = (await self._exchange(hello)).instance
                self._number += 1
                request = Request(
                    ask=Ask.CALL,
                    client=self._client,
                    number=self._number,
                    instance=self._instance,
                    method=method,
                    seconds_left=deadline - loop.time(),
                    arguments=arguments,
                )
                reply = await self._exchange(request)
        except TimeoutError as error:
            if limit.expired():
                raise no_answer(method, self._address, timeout) from error
            raise
        return value_of(reply, method, self._address)

    async def _exchange(self, request: Request) -> Reply:
        """Send, and send again at growing intervals, until the reply with the same number is there."""
        frames = encode_request(request)
        wait = FIRST_RESEND
        while True:
            await self._socket.send_multipart(frames, copy=False)
            reply = await self._receive(request.number, wait)
            if reply is not None:
                return reply
            self._resends += 1
            wait = min(2 * wait, LAST_RESEND)

    async def _receive(self, number: int, seconds: float) -> Reply | None:
        """The reply to ``number``, or None after ``seconds``; replies to calls given up earlier are dropped."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (left := until - loop.time()) > 0:
            # poll and then take: a cancelled wait must not swallow a message
            if not await self._socket.poll(max(1, int(left * 1000))):
                return None
            frames = await self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            reply = decode_reply([frame.buffer for frame in frames])
            if reply.number == number:
                if len(frames) > 1:
                    await self._acknowledge(number)
                return reply
        return None

    async def _acknowledge(self, number: int) -> None:
        """Let the server forget a large reply now rather than at the next call."""
        done = Request(ask=Ask.ACKNOWLEDGE, client=self._client, number=number, instance=self._instance)
        await self._socket.send_multipart(encode_request(done))
