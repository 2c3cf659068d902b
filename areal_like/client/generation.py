"""Interruptible generation over the pool: the engine that workflows end up talking to.

A request is a loop over segments: choose a server, post what is still to be written, append what came back, until a
stop or the budget ends the answer. A segment that is cut (``abort``) goes on where it ended; a server that fails hands
the request to another.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from areal_like.api.generation import ModelRequest, ModelResponse, StopReason
from areal_like.api.wire import GenerateBody, GenerateOutput
from areal_like.client.pool import ServerPool
from areal_like.client.poster import ConnectionBroken, Poster
from areal_like.client.retry import RetryPolicy
from areal_like.client.stitching import Draft, TextRules, extend_draft, start_draft
from areal_like.client.task_scope import leave
from areal_like.errors import (
    InfrastructureError,
    NoServerAvailable,
    RequestError,
    ServerBusy,
    ServerUnavailable,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """Totals since construction, and ``in_flight`` now. ``tokens`` were written by the policy and kept.

    ``retries`` are segments posted again after a failure, ``interruptions`` segments that a server cut short.
    """

    requests: int = 0
    in_flight: int = 0
    finished: int = 0
    refused: int = 0
    failed: int = 0
    retries: int = 0
    interruptions: int = 0
    segments: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    stopped: int = 0
    out_of_budget: int = 0


@dataclass(slots=True, kw_only=True)
class _Trip:
    """What one request has been through."""

    request: ModelRequest
    rid: str
    started: float
    deadline: float
    incarnation: int
    posts: int = 0
    failures: int = 0
    idle: int = 0
    avoid: set[str] = field(default_factory=set)
    server: str = ""
    trouble: str = ""
    ttft: float | None = None


class RemoteEngine:
    """:class:`areal_like.api.engine.InferenceEngine` over a :class:`ServerPool`. An async context manager.

    Its deadline covers everything: waiting for a server, every segment and every retry.
    """

    def __init__(
        self,
        pool: ServerPool,
        *,
        token: str,
        timeout: float = 600.0,
        retry: RetryPolicy | None = None,
        rules: TextRules | None = None,
    ) -> None:
        self._pool = pool
        self._timeout = timeout
        self._retry = retry or RetryPolicy()
        self._rules = rules or TextRules()
        self._poster = Poster(token=token)
        self._aborts = asyncio.TaskGroup()
        self._counts: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        await self._poster.__aenter__()
        await self._aborts.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await leave(self._aborts, kind, error, trace)
        finally:
            await self._poster.__aexit__(kind, error, trace)

    def get_version(self) -> int:
        """The lowest weight version acknowledged by any server in rotation; -1 before the first publication."""
        return self._pool.lowest_version

    def statistics(self) -> EngineStatistics:
        """A snapshot."""
        return EngineStatistics(**self._counts)

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """See :meth:`InferenceEngine.agenerate`.

        Raises:
            RequestError: empty or too long prompt, stop strings without a tokenizer, or a server's 4xx.
            NoServerAvailable: no server was in rotation when the deadline passed.
            ServerUnavailable: every try failed, or the answer did not come in time.
        """
        self._counts.update(requests=1, in_flight=1)
        try:
            trip = self._depart(request)
            draft = await self._write(trip)
        except RequestError:
            self._counts["refused"] += 1
            raise
        except InfrastructureError:
            self._counts["failed"] += 1
            raise
        finally:
            self._counts["in_flight"] -= 1
        return self._arrive(trip, draft)

    def _depart(self, request: ModelRequest) -> _Trip:
        now = asyncio.get_running_loop().time()
        return _Trip(
            request=request,
            rid=request.rid or uuid.uuid4().hex,
            started=now,
            deadline=now + self._timeout,
            incarnation=self._pool.incarnation,
        )

    async def _write(self, trip: _Trip) -> Draft:
        """Segments until the answer is finished."""
        draft: Draft | None = None
        while draft is None or draft.stop_reason is None:
            server = await self._choose(trip)
            draft = draft or start_draft(trip.request, self._pool.context_length or 0, self._rules)
            try:
                output = await self._post(trip, server, draft)
                longer = extend_draft(draft, output, self._rules)
            except ServerUnavailable as error:
                await self._recover(trip, server, error)
                continue
            await self._note_progress(trip, draft, longer)
            draft = longer
        return draft

    async def _choose(self, trip: _Trip) -> str:
        """A server for the next segment; waits for one until the deadline."""
        request = trip.request
        try:
            async with asyncio.timeout_at(trip.deadline):
                while True:
                    server = self._pool.route(
                        session_id=request.session_id, group_id=request.group_id, avoid=frozenset(trip.avoid)
                    )
                    if server is not None:
                        return server
                    await self._pool.changed()
        except TimeoutError:
            raise NoServerAvailable(
                f"request {trip.rid}: no server was in rotation within {self._timeout:g} s; {self._pool.whereabouts()}"
            ) from None

    async def _post(self, trip: _Trip, server: str, draft: Draft) -> GenerateOutput:
        """One segment from one server. Every post has a request id of its own, since an earlier one may still run."""
        dialect = self._pool.dialect(server)
        if closed := dialect.closed():
            raise ServerBusy(f"{server}: {closed}")
        trip.posts += 1
        rid = f"{trip.rid}.{trip.posts}"
        body = GenerateBody(rid=rid, input_ids=draft.input_ids, sampling=draft.sampling())
        posted, acknowledged = asyncio.get_running_loop().time(), self._pool.served_version(server)
        url = ""
        self._counts["segments"] += 1
        try:
            async with self._pool.lease(server, trip.deadline) as url:
                output, first = await self._poster.generate(server, url, body, dialect)
        except TimeoutError:
            self._abort_later(server, url, rid)
            raise _OutOfTime(
                f"request {trip.rid}: {server} did not answer within {self._timeout:g} s "
                f"({draft.written} tokens were written before{trip.trouble})"
            ) from None
        except asyncio.CancelledError:
            self._abort_later(server, url, rid)
            raise
        if trip.incarnation != self._pool.incarnation:
            raise _OutOfTime(f"request {trip.rid}: the run was restored meanwhile; the answer belongs to the past")
        oldest = min((span.version for span in output.spans), default=acknowledged)
        if oldest < acknowledged:
            self._pool.suspect(server)
            raise ServerUnavailable(
                f"{server} wrote under version {oldest} after it had acknowledged {acknowledged}: it was started "
                "again, or serves another run"
            )
        if trip.ttft is None and output.token_ids:
            trip.ttft = posted - trip.started + first
        trip.server = server
        return output

    async def _recover(self, trip: _Trip, server: str, error: ServerUnavailable) -> None:
        """Make ready for the next try, or raise. A busy server costs time, but none of the tries."""
        if isinstance(error, _OutOfTime):
            raise error
        if isinstance(error, ConnectionBroken):
            self._pool.suspect(server)
        trip.avoid.add(server)
        trip.failures += not isinstance(error, ServerBusy)
        trip.idle += 1
        trip.trouble = f"; the try before: {error}"
        if trip.failures > self._retry.retries:
            raise ServerUnavailable(f"request {trip.rid}: {trip.failures} tries failed; the last: {error}") from error
        pause = self._retry.pause(trip.idle, random.random())
        if asyncio.get_running_loop().time() + pause >= trip.deadline:
            raise ServerUnavailable(
                f"request {trip.rid}: {self._timeout:g} s are over; the last try: {error}"
            ) from error
        self._counts["retries"] += 1
        if isinstance(error, ServerBusy):
            await self._until_changed(pause)
        else:
            await asyncio.sleep(pause)

    async def _note_progress(self, trip: _Trip, draft: Draft, longer: Draft) -> None:
        """Failures are counted between two segments with tokens; one that was cut without any must not spin."""
        if longer.written > draft.written or longer.stop_reason is not None:
            trip.failures = trip.idle = 0
            trip.avoid.clear()
            return
        trip.idle += 1
        await self._until_changed(self._retry.pause(trip.idle, random.random()))

    async def _until_changed(self, seconds: float) -> None:
        """What keeps a server busy or cuts answers is an update, mostly: go on when it is acknowledged, not later."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._pool.changed()

    def _abort_later(self, server: str, url: str, rid: str) -> None:
        """Free the server's slot: nobody waits for this request any more."""
        if url:
            abort = self._poster.abort(server, url, rid, self._pool.dialect(server))
            self._aborts.create_task(abort, name=f"abort-{rid}")

    def _arrive(self, trip: _Trip, draft: Draft) -> ModelResponse:
        reason = draft.stop_reason or StopReason.STOP
        latency = asyncio.get_running_loop().time() - trip.started
        self._counts.update(
            finished=1,
            interruptions=draft.interruptions,
            prompt_tokens=len(draft.prompt),
            tokens=draft.written,
            stopped=reason is not StopReason.LENGTH,
            out_of_budget=reason is StopReason.LENGTH,
        )
        return ModelResponse(
            input_tokens=list(draft.prompt),
            output_tokens=list(draft.tokens),
            output_logprobs=list(draft.logprobs),
            output_versions=list(draft.versions),
            stop_reason=reason,
            latency=latency,
            ttft=latency if trip.ttft is None else trip.ttft,
            interruptions=draft.interruptions,
            server=trip.server,
        )


class _OutOfTime(ServerUnavailable):
    """Final for this request, whatever is left of its tries."""
