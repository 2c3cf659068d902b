from __future__ import annotations

import asyncio
import resource
import socket
from typing import Any

import pytest
from aiohttp import web

from areal_like.api.wire import GenerateBody, SamplingBody
from areal_like.client.poster import ConnectionBroken, Poster, raise_open_file_limit
from areal_like.errors import RequestError, ServerBusy, ServerUnavailable

BODY = GenerateBody(rid="r", input_ids=[1], sampling=SamplingBody(max_new_tokens=3))


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, RequestError),
        (401, RequestError),
        (404, RequestError),
        (408, ServerBusy),
        (409, ServerBusy),
        (429, ServerBusy),
        (503, ServerBusy),
        (500, ServerUnavailable),
        (502, ServerUnavailable),
    ],
)
async def test_each_status_has_its_error(server: Any, wire: Any, status: int, error: type[Exception]) -> None:
    async def refuse(body: GenerateBody) -> web.Response:
        return wire.refusal(status, "because")  # type: ignore[no-any-return]

    server.script = refuse
    async with Poster(token=wire.TOKEN) as poster:
        with pytest.raises(error, match=f"s0 /generate: {status}: Refused: because") as caught:
            await poster.generate("s0", server.url, BODY)
    assert type(caught.value) is error


async def test_a_refused_connection_is_broken(wire: Any) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        async with Poster(token=wire.TOKEN) as poster:
            with pytest.raises(ConnectionBroken, match="s9"):
                await poster.generate("s9", f"http://127.0.0.1:{reserved.getsockname()[1]}", BODY)


async def test_an_answer_that_breaks_off_is_broken(wire: Any) -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
        writer.close()
        await writer.wait_closed()

    listener = await asyncio.start_server(half, "127.0.0.1", 0)
    async with listener, Poster(token=wire.TOKEN) as poster:
        with pytest.raises(ConnectionBroken):
            await poster.generate("s0", f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", BODY)


async def test_an_abort_never_fails(server: Any, wire: Any) -> None:
    async with Poster(token=wire.TOKEN) as poster:
        await poster.abort("s0", server.url, "r1")
        assert server.aborted == ["r1"]
        await server.stop()
        await poster.abort("s0", server.url, "r2")


def test_the_limit_on_open_files_is_raised_to_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        raise_open_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
