"""A scripted inference server on a real socket, and a pool whose clocks suit tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web

from areal_like.api.generation import StopReason
from areal_like.api.weights import CommitReceipt
from areal_like.api.wire import (
    AbortBody,
    GenerateAnswer,
    GenerateBody,
    GenerateOutput,
    HealthAnswer,
    VersionSpan,
)
from areal_like.client.control import EmbeddedControl
from areal_like.client.health import HealthPolicy
from areal_like.client.pool import ServerPool

TOKEN = "test-token"
Script = Callable[[GenerateBody], Awaitable[GenerateOutput | web.Response]]

#: decisions within milliseconds; nothing here waits for the interval in the good case
QUICK = HealthPolicy(interval=0.05, timeout=5.0, failures=2, retry=0.005, readmit_after=0.01)


def output(tokens: list[int], reason: StopReason = StopReason.STOP, version: int = 0) -> GenerateOutput:
    """An answer whose log-probs can be told apart: minus a tenth of the token."""
    spans = [VersionSpan(version=version, start=0, end=len(tokens))] if tokens else []
    return GenerateOutput(token_ids=tokens, logprobs=[-t / 10 for t in tokens], spans=spans, stop_reason=reason)


def refusal(status: int, message: str, kind: str = "Refused") -> web.Response:
    return web.json_response({"error": {"type": kind, "message": message}}, status=status)


class WireServer:
    """Answers /generate by ``script`` (default: the budget's worth of 1s) and keeps what it was asked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.url = ""
        self.script: Script = self._ones
        self.bodies: list[GenerateBody] = []
        self.aborted: list[str] = []
        self.abort_seen = asyncio.Event()
        self.in_flight = 0
        self.peak = 0
        self.health = HealthAnswer(
            status="ok", version=0, incarnation=0, paused=False, in_flight=0, queued=0, context_length=64
        )
        self.asked_health = asyncio.Event()
        self.other: dict[str, web.Response | Callable[[], Awaitable[web.Response]]] = {}
        self.tokens_seen: list[str] = []
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort", self._abort)
        app.router.add_get("/health", self._health)
        app.router.add_route("*", "/{path:.*}", self._other)
        self._runner = web.AppRunner(app, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        """Close every socket, those in use too."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def receipt(self, version: int = 0, incarnation: int = 0) -> CommitReceipt:
        return CommitReceipt(
            server=self.name,
            incarnation=incarnation,
            version=version,
            digest="",
            bytes=0,
            seconds_staged=0.0,
            seconds_paused=0.0,
            interrupted_requests=0,
        )

    async def _ones(self, body: GenerateBody) -> GenerateOutput:
        return output([1] * body.sampling.max_new_tokens, StopReason.LENGTH, self.health.version)

    async def _generate(self, request: web.Request) -> web.Response:
        self.tokens_seen.append(request.headers.get("Authorization", ""))
        body = GenerateBody.model_validate_json(await request.read())
        self.bodies.append(body)
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            answer = await self.script(body)
        finally:
            self.in_flight -= 1
        if isinstance(answer, web.Response):
            return answer
        whole = GenerateAnswer(rid=body.rid, outputs=[answer], seconds_to_first_token=0.0, seconds=0.0)
        return web.Response(text=whole.model_dump_json(), content_type="application/json")

    async def _abort(self, request: web.Request) -> web.Response:
        rids = AbortBody.model_validate_json(await request.read()).rids
        self.aborted += rids
        self.abort_seen.set()
        return web.json_response({"aborted": len(rids)})

    async def _health(self, request: web.Request) -> web.Response:
        self.asked_health.set()
        found = self.other.get("/health")
        if found is not None:
            return await found() if callable(found) else found
        return web.Response(text=self.health.model_dump_json(), content_type="application/json")

    async def _other(self, request: web.Request) -> web.Response:
        self.tokens_seen.append(request.headers.get("Authorization", ""))
        found = self.other.get(request.path)
        if found is None:
            return refusal(404, f"no {request.path}")
        return await found() if callable(found) else found


@pytest.fixture
async def new_server() -> AsyncIterator[Callable[[str], Awaitable[WireServer]]]:
    started: list[WireServer] = []

    async def make(name: str = "s0") -> WireServer:
        server = WireServer(name)
        await server.start()
        started.append(server)
        return server

    yield make
    for server in started:
        await server.stop()


@pytest.fixture
async def server(new_server: Callable[[str], Awaitable[WireServer]]) -> WireServer:
    return await new_server("s0")


@asynccontextmanager
async def pool_of(*servers: WireServer, policy: HealthPolicy = QUICK) -> AsyncIterator[ServerPool]:
    """A pool with every server in rotation at version 0."""
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(ServerPool(policy))
        for server in servers:
            await pool.add(server.name, server.url, EmbeddedControl(server.name, server.url, token=TOKEN))
            pool.acknowledge(server.receipt())
        yield pool


@pytest.fixture
def wire() -> object:
    """What tests build answers with: ``wire.output``, ``wire.refusal``, ``wire.pool_of``, ``wire.TOKEN``."""

    class Wire:
        pass

    made = Wire()
    for thing in (output, refusal, pool_of):
        setattr(made, thing.__name__, thing)
    made.TOKEN, made.QUICK = TOKEN, QUICK  # type: ignore[attr-defined]
    return made
