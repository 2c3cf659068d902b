"""A socket on a thread of its own that answers while the rest of its process is busy with a long call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import zmq

from areal_like.errors import RpcError
from areal_like.rpc import security
from areal_like.rpc.protocol import Answer, Reply, decode_request, encode_reply

#: milliseconds within which closing is noticed
_POLL_MS = 50


class HealthServer:
    """Answers any request (method ``health`` by custom) with ``snapshot()``, a dict of plain values.

    ``snapshot`` runs on this server's thread: it may read, not touch, what others write. Use it as a context.
    """

    def __init__(
        self, bind: str, snapshot: Callable[[], Mapping[str, Any]], *, keys: security.RunKeys | None = None
    ) -> None:
        self._snapshot = snapshot
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._closing = threading.Event()
        try:
            self._address, self._authenticator = security.bind(self._socket, bind, keys)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._serve, name=f"health {bind}", daemon=True)

    @property
    def address(self) -> str:
        return self._address

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join()
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def _serve(self) -> None:
        while not self._closing.is_set():
            if not self._socket.poll(_POLL_MS):
                continue
            route, *frames = self._socket.recv_multipart()
            try:
                request = decode_request(frames)
            except RpcError:
                continue
            value = dict(self._snapshot()) if request.method else None
            answer = Answer.RESULT if request.method else Answer.HELLO
            reply = Reply(answer=answer, number=request.number, instance="health", value=value)
            self._socket.send_multipart([route, *encode_reply(reply)])
