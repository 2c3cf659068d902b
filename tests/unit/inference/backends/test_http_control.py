"""Control calls over real sockets: vLLM's next answer on a connection that carried a 500 fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from areal_like.errors import ArealLikeError, RequestError, ServerUnavailable
from areal_like.inference.backends import ENGINES, get_backend
from areal_like.inference.backends.http_control import EngineHttp

STATUSES = {
    "/fine": "200 OK",
    "/broken": "500 Internal Server Error",
    "/wrong": "400 Bad Request",
    "/version": "401 Unauthorized",
    "/server_info": "403 Forbidden",
}


class Spoiled:
    """Keeps connections alive, and answers rubbish on one that has carried an error."""

    def __init__(self) -> None:
        self.connections = 0
        self.port = 0

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        spoiled = False
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
                status = "rubbish" if spoiled else STATUSES[path]
                spoiled = spoiled or not status.startswith("200")
                body = b'{"error": {"message": "words"}}'
                head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: keep-alive\r\n\r\n"
                writer.write(head.encode() + body)
                await writer.drain()
        writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Spoiled]:
    spoiled = Spoiled()
    async with await asyncio.start_server(spoiled.talk, "127.0.0.1", 0) as listening:
        spoiled.port = listening.sockets[0].getsockname()[1]
        yield spoiled
        listening.close()


@pytest.fixture
async def http(server: Spoiled) -> AsyncIterator[EngineHttp]:
    opened = EngineHttp("s0", f"http://127.0.0.1:{server.port}", token="t")
    yield opened
    await opened.aclose()


async def test_a_connection_that_carried_an_error_is_never_used_again(http: EngineHttp, server: Spoiled) -> None:
    for _ in range(3):
        with pytest.raises(ServerUnavailable, match="s0 /broken: 500: words"):
            await http.get("/broken", timeout=5)
        with pytest.raises(RequestError, match="s0 /wrong: 400: words"):
            await http.get("/wrong", timeout=5)
        assert await http.get("/fine", timeout=5) == {"error": {"message": "words"}}
    assert server.connections == 9


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_server_that_wants_another_token_is_not_taken_for_one_that_is_not_there(
    server: Spoiled, engine: str
) -> None:
    with pytest.raises(RequestError, match="asks for another bearer token"):
        await get_backend(engine).version(f"http://127.0.0.1:{server.port}", token="wrong", timeout=5)


async def test_a_server_that_does_not_answer_is_an_error_in_time() -> None:
    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(listen, "127.0.0.1", 0) as silent:
        http = EngineHttp("s0", f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}", token="t")
        with pytest.raises(ServerUnavailable, match=r"/fine: no answer within 0\.1 s"):
            await http.get("/fine", timeout=0.1)
        await http.aclose()
    with pytest.raises(ArealLikeError, match="ConnectError"):
        gone = EngineHttp("s0", "http://127.0.0.1:1", token="t")
        await gone.get("/fine", timeout=5)
    await gone.aclose()
