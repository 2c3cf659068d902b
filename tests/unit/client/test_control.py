from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from areal_like.api.weights import InterruptMode, TensorEntry, TransportKind
from areal_like.client.control import EmbeddedControl
from areal_like.errors import RequestError, ServerUnavailable, StaleCommand, WeightUpdateError
from areal_like.weights.manifest import make_manifest

MANIFEST = make_manifest(
    1,
    0,
    TransportKind.SHM,
    "areal-like-x+0",
    [TensorEntry(name="a", dtype="float32", shape=(1,), nbytes=4, digest="d" * 32)],
)


@pytest.fixture
async def control(server: Any, wire: Any) -> AsyncIterator[EmbeddedControl]:
    made = EmbeddedControl("s0", server.url, token=wire.TOKEN)
    yield made
    await made.aclose()


Call = Callable[[EmbeddedControl, float], Awaitable[object]]
CALLS: dict[str, Call] = {
    "/health": lambda c, t: c.health(timeout=t),
    "/weights/digest": lambda c, t: c.digest(timeout=t),
    "/pause": lambda c, t: c.pause(incarnation=0, mode=InterruptMode.KEEP, timeout=t),
    "/resume": lambda c, t: c.resume(incarnation=0, timeout=t),
    "/weights/stage": lambda c, t: c.stage(MANIFEST, timeout=t),
    "/weights/commit": lambda c, t: c.commit(version=1, incarnation=0, mode=InterruptMode.KEEP, timeout=t),
}


async def test_every_call_answers_with_its_type(control: EmbeddedControl, server: Any, wire: Any) -> None:
    receipt = server.receipt(version=1)
    server.other = {
        "/weights/digest": web.json_response({"version": 1, "digest": "x"}),
        "/pause": web.json_response({"paused": True, "in_flight": 2, "version": 1}),
        "/resume": web.json_response({"paused": False, "in_flight": 2, "version": 1}),
        "/weights/stage": web.json_response({"version": 1, "bytes": 4, "seconds": 0.1}),
        "/weights/commit": web.json_response(receipt.model_dump()),
    }
    answers = {path: await call(control, 5) for path, call in CALLS.items()}
    assert answers["/health"] == server.health
    assert answers["/pause"].paused and not answers["/resume"].paused  # type: ignore[attr-defined]
    assert answers["/weights/commit"] == receipt
    assert answers["/weights/stage"].bytes == 4  # type: ignore[attr-defined]
    assert answers["/weights/digest"].digest == "x"  # type: ignore[attr-defined]
    assert await control.abort(["r1", "r2"], timeout=5) == 2
    assert server.aborted == ["r1", "r2"]
    assert set(server.tokens_seen) == {f"Bearer {wire.TOKEN}"}


@pytest.mark.parametrize("path", CALLS)
async def test_a_server_that_hangs_ends_at_the_deadline(control: EmbeddedControl, server: Any, path: str) -> None:
    async def hang() -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    server.other[path] = hang
    with pytest.raises(ServerUnavailable, match=rf"s0 {path}: no answer within 0\.1 s"):
        await CALLS[path](control, 0.1)


@pytest.mark.parametrize("path", CALLS)
async def test_conflict_is_a_stale_command(control: EmbeddedControl, server: Any, wire: Any, path: str) -> None:
    server.other[path] = wire.refusal(409, "incarnation 3 was seen", "StaleCommand")
    with pytest.raises(StaleCommand, match="incarnation 3 was seen"):
        await CALLS[path](control, 5)


@pytest.mark.parametrize(
    ("path", "error"),
    [("/pause", RequestError), ("/weights/stage", WeightUpdateError), ("/weights/commit", WeightUpdateError)],
)
async def test_a_refusal_carries_the_servers_words(
    control: EmbeddedControl, server: Any, wire: Any, path: str, error: type[Exception]
) -> None:
    server.other[path] = wire.refusal(400, "tensor 'a' is missing")
    with pytest.raises(error, match="400: Refused: tensor 'a' is missing"):
        await CALLS[path](control, 5)


@pytest.mark.parametrize("status", [400, 409, 500])
async def test_a_failed_update_is_told_from_a_stale_command(
    control: EmbeddedControl, server: Any, wire: Any, status: int
) -> None:
    server.other["/weights/stage"] = wire.refusal(status, "tensor 'a' is missing", "WeightUpdateError")
    with pytest.raises(WeightUpdateError, match="tensor 'a' is missing"):
        await CALLS["/weights/stage"](control, 5)


@pytest.mark.parametrize("answer", [b"not json", b"{}", b""])
async def test_a_broken_answer_is_the_servers_fault(control: EmbeddedControl, server: Any, answer: bytes) -> None:
    server.other["/pause"] = web.Response(body=answer)
    with pytest.raises(ServerUnavailable, match="wire schema"):
        await CALLS["/pause"](control, 5)


async def test_an_internal_error_is_the_servers_fault_and_the_next_call_works(
    control: EmbeddedControl, server: Any
) -> None:
    server.other["/pause"] = web.Response(status=500, text="boom")
    with pytest.raises(ServerUnavailable, match="500: boom"):
        await CALLS["/pause"](control, 5)
    assert (await control.health(timeout=5)).status == "ok"


async def test_a_refused_connection_is_named() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        control = EmbeddedControl("s9", f"http://127.0.0.1:{reserved.getsockname()[1]}", token="t")
        with pytest.raises(ServerUnavailable, match="s9 /health: ConnectError"):
            await control.health(timeout=5)
        await control.aclose()


async def test_no_connection_is_kept(control: EmbeddedControl, server: Any) -> None:
    await control.health(timeout=5)
    await server.stop()
    await server.start(server.port)
    assert (await control.health(timeout=5)).status == "ok"


async def test_a_proxy_of_the_environment_is_not_used(server: Any, wire: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    control = EmbeddedControl("s0", server.url, token=wire.TOKEN)
    assert (await control.health(timeout=5)).status == "ok"
    await control.aclose()
