"""One generation request to one server over aiohttp: typed errors in, a checked answer out; no retries here."""

from __future__ import annotations

import asyncio
import resource
from types import TracebackType
from typing import NoReturn, Self

import aiohttp

from areal_like.api.wire import GenerateBody, GenerateOutput
from areal_like.client.dialect import EMBEDDED, Dialect, HttpCall
from areal_like.client.http_errors import error_message
from areal_like.errors import RequestError, ServerBusy, ServerUnavailable

#: below uvicorn's default of 5 s, so that a pooled connection is never closed by the server while we write into it
KEEPALIVE_SECONDS = 3.0
#: until a connection counts as refused; the answer itself may take the request's whole deadline
CONNECT_SECONDS = 10.0
#: a cut request is reported to its server, which is not waited for longer than this
ABORT_SECONDS = 2.0
#: statuses that mean "come back later" rather than "wrong"
_NOT_NOW = frozenset({408, 409, 425, 429, 503})


class ConnectionBroken(ServerUnavailable):
    """No connection, or it ended in the middle of an answer: the server may be dead."""


class Poster:
    """One aiohttp session without a limit on connections. An async context manager."""

    def __init__(self, *, token: str) -> None:
        self._token = token

    async def __aenter__(self) -> Self:
        raise_open_file_limit()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,  # a proxy of the environment must not see the run's token
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def generate(
        self, server: str, url: str, body: GenerateBody, dialect: Dialect = EMBEDDED
    ) -> tuple[GenerateOutput, float]:
        """The only output of a request with n = 1, and the server's seconds to its first token.

        Raises:
            RequestError: 4xx with the server's message, or the engine cannot do what ``body`` asks.
            ConnectionBroken, ServerBusy, ServerUnavailable: anything else; another try may succeed.
        """
        call = dialect.generate(body)
        where = f"{server} {call.path}"
        status, content = await self._post(server, url, call)
        if status != 200:
            _refuse(where, status, content)
        try:
            segment = dialect.read(body, content)
        except ServerUnavailable as error:
            raise ServerUnavailable(f"{where}: {error}") from error
        return segment.output, segment.seconds_to_first_token

    async def abort(self, server: str, url: str, rid: str, dialect: Dialect = EMBEDDED) -> None:
        """Tell a server that nobody waits for ``rid`` any more. Best effort: the request may be gone already."""
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                await self._post(server, url, dialect.abort(rid))
        except (TimeoutError, ServerUnavailable):
            return

    async def _post(self, server: str, url: str, call: HttpCall) -> tuple[int, bytes]:
        try:
            async with self._session.post(f"{url}{call.path}", data=call.content) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionBroken(f"{server}: {type(error).__name__}: {error}") from error


def raise_open_file_limit() -> None:
    """Open as many sockets as the hard limit allows: the usual soft limit of 1,024 files would cap concurrency."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _refuse(where: str, status: int, content: bytes) -> NoReturn:
    message = f"{where}: {status}: {error_message(content)}"
    if status in _NOT_NOW:
        raise ServerBusy(message)
    if 400 <= status < 500:
        raise RequestError(message)
    raise ServerUnavailable(message)
