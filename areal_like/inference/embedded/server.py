"""The server process: one model, one decode thread, one port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Self

import uvicorn
import uvloop
from transformers.utils.logging import disable_progress_bar

from areal_like.errors import ConfigError, InfrastructureError
from areal_like.inference.embedded.allocator import keep_freed_memory
from areal_like.inference.embedded.app import make_app
from areal_like.inference.embedded.service import InferenceService
from areal_like.inference.spec import InferenceServerSpec

_log = logging.getLogger(__name__)

#: seconds an idle connection is kept: longer than any client of ours keeps it, so that the client closes first
_KEEP_ALIVE = 600
#: connections that may wait to be accepted: a whole batch of episodes connects at once
_BACKLOG = 4096
#: seconds that open connections have to end in when the server closes
_CLOSE_TIMEOUT = 3
#: seconds in which a failed server still answers (500, and its health) before it exits
_FAILED_LINGER = 2.0


class _Uvicorn(uvicorn.Server):
    """Says when it listens, and leaves signals to whoever runs the process."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class EmbeddedServer:
    """A listening server. ``async with`` starts it; leaving aborts what runs, answers it, and closes the port."""

    def __init__(self, spec: InferenceServerSpec, token: str) -> None:
        self._spec = spec
        self._token = token
        self._resources = AsyncExitStack()
        self._address = ""
        self._service: InferenceService | None = None

    @property
    def address(self) -> str:
        """``http://host:port``, once entered."""
        return self._address

    @property
    def service(self) -> InferenceService:
        """What answers, once entered."""
        assert self._service is not None, "enter the server first"
        return self._service

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as starting:
            listener = starting.enter_context(_bind(self._spec))
            service = await asyncio.to_thread(InferenceService, self._spec)
            await starting.enter_async_context(service)
            await starting.enter_async_context(_serving(service, listener, self._token))
            self._service = service
            self._address = "http://{}:{}".format(*listener.getsockname()[:2])
            self._resources = starting.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._resources.aclose()

    async def wait_failed(self) -> str:
        """Return the reason once the decode loop has failed and those who waited have been told."""
        await self.service.wait_failed()
        await asyncio.sleep(_FAILED_LINGER)
        return self.service.failure


def run_server(spec: InferenceServerSpec, token: str, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. ``on_ready`` gets the address, in another thread, once requests are answered.

    Raises:
        ConfigError: the model or the port cannot be had.
        InfrastructureError: the decode loop failed.
    """
    keep_freed_memory()
    disable_progress_bar()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(spec, token, on_ready))


async def _run(spec: InferenceServerSpec, token: str, on_ready: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with EmbeddedServer(spec, token) as server:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await asyncio.to_thread(on_ready, server.address)
        _log.info("%s serves %s at %s", spec.name, spec.model_path, server.address)
        stopped = asyncio.create_task(stop.wait(), name="wait-for-signal")
        failed = asyncio.create_task(server.wait_failed(), name="wait-for-failure")
        done, pending = await asyncio.wait((stopped, failed), return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
    if failed in done:
        raise InfrastructureError(f"{spec.name}: the decode loop failed: {failed.result()}")


def _bind(spec: InferenceServerSpec) -> socket.socket:
    family = socket.AF_INET6 if ":" in spec.host else socket.AF_INET
    try:
        return socket.create_server((spec.host, spec.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"rollout.host, rollout.port: {spec.name} cannot listen on {spec.host}:{spec.port}: {error.strerror}; "
            "choose another port, or 0 for any"
        ) from error


@contextlib.asynccontextmanager
async def _serving(service: InferenceService, listener: socket.socket, token: str) -> AsyncIterator[None]:
    """uvicorn on ``listener``; at the end requests in flight are aborted and answered first."""
    config = uvicorn.Config(
        make_app(service, token),
        http="httptools",
        lifespan="off",
        log_config=None,
        access_log=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT,
        server_header=False,
        date_header=False,
        proxy_headers=False,
    )
    server = _Uvicorn(config)
    serve = asyncio.create_task(server.serve(sockets=[listener]), name="http-server")
    listening = asyncio.create_task(server.listening.wait(), name="http-listening")
    await asyncio.wait((serve, listening), return_when=asyncio.FIRST_COMPLETED)
    listening.cancel()
    if serve.done():
        serve.result()
        raise InfrastructureError("the HTTP server ended while it started")
    try:
        yield
    finally:
        await service.end_all()
        server.should_exit = True
        await serve
