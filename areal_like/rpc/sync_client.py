"""The blocking twin of :class:`areal_like.rpc.client.RpcClient`, for train ranks and for a process's start."""

from __future__ import annotations

import threading
import time
import uuid
from types import TracebackType
from typing import Any, Self

import zmq

from areal_like.rpc import security
from areal_like.rpc.client import RpcClientStatistics
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


class SyncRpcClient:
    """Calls methods of one server, one at a time. Threads may share it; they wait for each other.

    Use as ``with SyncRpcClient(address) as client``.
    """

    def __init__(self, address: str, *, keys: security.RunKeys | None = None) -> None:
        self._address = address
        self._context = zmq.Context()
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
        self._turn = threading.Lock()

    @property
    def address(self) -> str:
        return self._address

    def statistics(self) -> RpcClientStatistics:
        return RpcClientStatistics(calls=self._number, resends=self._resends)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def call(self, method: str, *, timeout: float, **arguments: Any) -> Any:
        """Run ``method`` on the server with ``arguments`` and return what it returned, within ``timeout`` seconds.

        Raises:
            RemoteError: the method raised there; carries its type and traceback.
            RpcError: no answer in time, or the server refused (its deadline passed, or it was restarted meanwhile).
            TypeError: an argument cannot cross a socket.
        """
        deadline = time.monotonic() + timeout
        if not self._turn.acquire(timeout=timeout):
            raise no_answer(method, self._address, timeout)
        try:
            if not self._instance:
                hello = Request(ask=Ask.HELLO, client=self._client, number=0)
                self._instance = self._exchange(hello, deadline).instance
            self._number += 1
            request = Request(
                ask=Ask.CALL,
                client=self._client,
                number=self._number,
                instance=self._instance,
                method=method,
                seconds_left=deadline - time.monotonic(),
                arguments=arguments,
            )
            reply = self._exchange(request, deadline)
        except TimeoutError as error:
            raise no_answer(method, self._address, timeout) from error
        finally:
            self._turn.release()
        return value_of(reply, method, self._address)

    def _exchange(self, request: Request, deadline: float) -> Reply:
        """Send, and send again at growing intervals, until the reply with the same number is there.

        Raises:
            TimeoutError: ``deadline`` (on the monotonic clock) passed.
        """
        frames = encode_request(request)
        wait = FIRST_RESEND
        while (left := deadline - time.monotonic()) > 0:
            self._socket.send_multipart(frames, copy=False)
            reply = self._receive(request.number, min(wait, left))
            if reply is not None:
                return reply
            self._resends += 1
            wait = min(2 * wait, LAST_RESEND)
        raise TimeoutError

    def _receive(self, number: int, seconds: float) -> Reply | None:
        """The reply to ``number``, or None after ``seconds``; replies to calls given up earlier are dropped."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if not self._socket.poll(max(1, int(left * 1000))):
                return None
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            reply = decode_reply([frame.buffer for frame in frames])
            if reply.number == number:
                if len(frames) > 1:
                    done = Request(ask=Ask.ACKNOWLEDGE, client=self._client, number=number, instance=self._instance)
                    self._socket.send_multipart(encode_request(done))
                return reply
        return None
