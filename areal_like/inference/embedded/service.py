"""The server's verbs, without HTTP: from a checked body to an answer, on the event loop.

Joins the event loop to the engine's thread: requests go in as they come, finished ones come back once per step.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Self, TypeVar

import torch

from areal_like.api.weights import CommitReceipt
from areal_like.api.wire import (
    AbortBody,
    ClaimBody,
    CommitBody,
    ControlBody,
    DigestAnswer,
    GenerateBody,
    HealthAnswer,
    PauseAnswer,
    PauseBody,
    StageAnswer,
    StageBody,
)
from areal_like.errors import InfrastructureError, ServerUnavailable
from areal_like.inference.embedded.engine import DecodeEngine, PauseState
from areal_like.inference.embedded.loop import DecodeLoop
from areal_like.inference.embedded.model import (
    ModelRunner,
    cache_token_bytes,
    context_length,
    default_cache_bytes,
    eos_ids,
    load_decoder,
    load_model,
)
from areal_like.inference.embedded.requests import Request, RequestLimits, make_request
from areal_like.inference.embedded.seeds import sibling_seed
from areal_like.inference.embedded.served_weights import ServedWeights
from areal_like.inference.embedded.slots import CacheShape
from areal_like.inference.spec import InferenceServerSpec
from areal_like.weights.staging import StagedWeights

T = TypeVar("T")
_log = logging.getLogger(__name__)

#: waits until the caller has gone
Gone = Callable[[], Awaitable[object]]
#: seconds before a request's connection is watched: most answers are back by then, and a watch costs a task
_WATCH_AFTER = 0.05


class InferenceService:
    """One model served. An async context manager; the engine's thread lives inside it."""

    def __init__(self, spec: InferenceServerSpec) -> None:
        """Loads the model, so this takes seconds: call it off the event loop.

        Raises:
            ConfigError: the model or its limits cannot be served.
        """
        torch.set_num_threads(spec.threads)
        device = torch.device(spec.device)
        model = load_model(spec)
        runner = ModelRunner(model, device=device)
        self._spec = spec
        self._limits = RequestLimits(
            vocabulary=runner.vocabulary,
            context_length=context_length(model, spec.context_length),
            eos_ids=eos_ids(model),
            decoder=load_decoder(spec.model_path),
        )
        shape = CacheShape(
            max_rows=spec.max_batch_size,
            token_bytes=cache_token_bytes(model),
            max_bytes=spec.kv_cache_bytes or default_cache_bytes(device),
        )
        self._waiters: dict[Request, asyncio.Future[bool]] = {}
        self._numbers = itertools.count()
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._failed = asyncio.Event()
        self._engine = DecodeEngine(
            DecodeLoop(runner, shape), deliver=self._deliver, failed=self._engine_failed, threads=spec.threads
        )
        self._weights = ServedWeights(StagedWeights(model.state_dict()), self._engine, server=spec.name)
        self._resources = ExitStack()
        self._closing = False

    async def __aenter__(self) -> Self:
        self._event_loop = asyncio.get_running_loop()
        self._resources.enter_context(self._engine)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._resources.close)

    @property
    def failure(self) -> str:
        """Why the decode loop ended, or empty."""
        return self._engine.failure

    async def wait_failed(self) -> None:
        """Return once the decode loop has failed."""
        await self._failed.wait()

    async def generate(self, body: GenerateBody, gone: Gone) -> Request:
        """Run one request to its end. If its caller goes away it is aborted and makes room.

        Raises:
            RequestError: it can never succeed.
            InfrastructureError: the server failed it.
            ServerUnavailable: the server is closing.
        """
        if self._closing:
            raise ServerUnavailable("the server is closing")
        request = make_request(body, self._limits, default_seed=self._next_seed, now=time.monotonic())
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters[request] = waiter
        try:
            self._engine.submit(request)
            if not await _answered(waiter, gone):
                self._engine.abort(lambda r: r is request)
                raise ServerUnavailable(f"the caller of request {body.rid!r} has gone")
        finally:
            self._waiters.pop(request, None)
        if request.error:
            raise InfrastructureError(request.error)
        return request

    async def abort(self, body: AbortBody) -> int:
        """End the named requests (all if none is named) with what they have; how many there were."""
        rids = frozenset(body.rids)
        return await asyncio.wrap_future(self._engine.abort(lambda r: not rids or r.rid in rids))

    async def end_all(self) -> None:
        """Refuse new requests from now on, and answer those in flight with what they have."""
        self._closing = True
        with suppress(InfrastructureError):  # a loop that failed has answered them already
            await self.abort(AbortBody())

    async def pause(self, body: PauseBody) -> PauseAnswer:
        self._weights.check_incarnation(body.incarnation)
        return _pause_answer(await asyncio.wrap_future(self._engine.pause(body.mode)))

    def claim(self, body: ClaimBody) -> HealthAnswer:
        self._weights.claim(body.incarnation, body.run_id)
        return self.health()

    async def resume(self, body: ControlBody) -> PauseAnswer:
        self._weights.check_incarnation(body.incarnation)
        return _pause_answer(await asyncio.wrap_future(self._engine.resume()))

    async def stage(self, body: StageBody) -> StageAnswer:
        return await self._weights.stage(body)

    async def commit(self, body: CommitBody, gone: Gone) -> CommitReceipt:
        """Swap the staged version in. A drain whose caller goes away before the swap is withdrawn."""

        async def wait(order: Future[T]) -> T:
            waiter = asyncio.wrap_future(order)
            await _until_done_or_gone(waiter, gone)
            if not waiter.done() and order.cancel():
                raise ServerUnavailable(f"the caller of commit {body.version} has gone; the commit was withdrawn")
            return await waiter

        return await self._weights.commit(body, wait)

    async def digest(self) -> DigestAnswer:
        return await self._weights.digest()

    def health(self) -> HealthAnswer:
        now = self._engine.statistics()
        return HealthAnswer(
            status="failed" if self.failure else "ok",
            version=now.version,
            incarnation=self._weights.incarnation,
            paused=now.paused,
            in_flight=now.running,
            queued=now.queued,
            context_length=self._limits.context_length,
            reason=self.failure,
        )

    def metrics(self) -> dict[str, float]:
        """The engine's statistics and the bytes of weights received, as plain numbers."""
        return {**asdict(self._engine.statistics()), "weight_bytes": self._weights.bytes_total}

    def _next_seed(self) -> int:
        return sibling_seed(self._spec.seed, next(self._numbers))

    # called in the engine's thread
    def _deliver(self, finished: list[Request]) -> None:
        if self._event_loop is not None:
            self._event_loop.call_soon_threadsafe(self._wake_waiters, finished)

    def _engine_failed(self, reason: str) -> None:
        if self._event_loop is not None:
            self._event_loop.call_soon_threadsafe(self._failed.set)

    # called on the event loop
    def _wake_waiters(self, finished: list[Request]) -> None:
        for request in finished:
            waiter = self._waiters.get(request)
            if waiter is not None and not waiter.done():
                waiter.set_result(True)


def _pause_answer(state: PauseState) -> PauseAnswer:
    return PauseAnswer(paused=state.paused, in_flight=state.in_flight, version=state.version)


async def _answered(waiter: asyncio.Future[bool], gone: Gone) -> bool:
    """Wait for the answer; False if the caller went away first. The connection is watched from a while on only."""
    loop = asyncio.get_running_loop()
    watches: list[asyncio.Future[object]] = []

    def give_up(_: asyncio.Future[object]) -> None:
        if not waiter.done():
            waiter.set_result(False)

    def watch() -> None:
        watches.append(asyncio.ensure_future(gone()))
        watches[0].add_done_callback(give_up)

    timer = loop.call_later(_WATCH_AFTER, watch)
    try:
        return await waiter
    finally:
        timer.cancel()
        for watching in watches:
            watching.cancel()


async def _until_done_or_gone(waiter: asyncio.Future[T], gone: Gone) -> None:
    """Return when ``waiter`` is done or the caller has gone, whichever comes first."""
    watch = asyncio.ensure_future(gone())
    try:
        await asyncio.wait((waiter, watch), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watch.cancel()
