from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from areal_like.api.engine import InferenceEngine
from areal_like.api.generation import GenerationHyperparameters, ModelRequest, StopReason
from areal_like.api.wire import GenerateBody, GenerateOutput, VersionSpan
from areal_like.client.control import EmbeddedControl
from areal_like.client.dialect import EmbeddedDialect
from areal_like.client.generation import RemoteEngine
from areal_like.client.pool import ServerPool
from areal_like.client.retry import RetryPolicy
from areal_like.client.seeds import mix
from areal_like.client.stitching import TextRules
from areal_like.errors import NoServerAvailable, RequestError, ServerUnavailable

New = Callable[[str], Awaitable[Any]]
FAST = RetryPolicy(retries=3, first=0.001, limit=0.01)


def decode(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


@asynccontextmanager
async def _engine(
    wire: Any, *servers: Any, timeout: float = 10.0, retry: RetryPolicy = FAST
) -> AsyncIterator[tuple[RemoteEngine, ServerPool]]:
    rules = TextRules(decode=decode, eos_token_ids=frozenset({0}))
    async with (
        wire.pool_of(*servers) as pool,
        RemoteEngine(pool, token=wire.TOKEN, timeout=timeout, retry=retry, rules=rules) as engine,
    ):
        yield engine, pool


def _request(prompt: Sequence[int] = (7, 8), seed: int | None = 5, **gconfig: object) -> ModelRequest:
    asked = GenerationHyperparameters.model_validate({"max_new_tokens": 6, **gconfig})
    return ModelRequest(input_ids=prompt, gconfig=asked, rid="r", seed=seed)


def _script(*answers: GenerateOutput | web.Response) -> Callable[[GenerateBody], Awaitable[Any]]:
    left = list(answers)

    async def answer(body: GenerateBody) -> Any:
        return left.pop(0)

    return answer


async def test_an_answer_in_one_piece(server: Any, wire: Any) -> None:
    server.script = _script(wire.output([3, 4], version=2))
    async with _engine(wire, server) as (engine, _):
        assert isinstance(engine, InferenceEngine)
        response = await engine.agenerate(_request(temperature=0.7))
        assert (response.input_tokens, response.output_tokens) == ([7, 8], [3, 4])
        assert response.output_logprobs == [-0.3, -0.4]
        assert response.output_versions == [2, 2]
        assert (response.stop_reason, response.server, response.interruptions) == (StopReason.STOP, "s0", 0)
        assert 0 <= response.ttft <= response.latency < 5
        assert engine.get_version() == 0
    (body,) = server.bodies
    assert (body.input_ids, body.n) == ([7, 8], 1)
    assert (body.sampling.seed, body.sampling.temperature, body.sampling.max_new_tokens) == (5, 0.7, 6)
    assert server.tokens_seen == [f"Bearer {wire.TOKEN}"]


async def test_a_cut_answer_goes_on_where_it_ended(server: Any, wire: Any) -> None:
    server.script = _script(
        wire.output([10, 11], StopReason.ABORT, version=1),
        wire.output([], StopReason.ABORT),
        wire.output([12], StopReason.ABORT, version=2),
        wire.output([13, 14, 15], StopReason.LENGTH, version=3),
    )
    async with _engine(wire, server) as (engine, _):
        response = await engine.agenerate(_request(min_new_tokens=4))
        assert response.output_tokens == [10, 11, 12, 13, 14, 15]
        assert response.output_versions == [1, 1, 2, 3, 3, 3]
        assert response.output_logprobs == [-1.0, -1.1, -1.2, -1.3, -1.4, -1.5]
        assert (response.stop_reason, response.interruptions) == (StopReason.LENGTH, 3)
        assert engine.statistics().interruptions == 3
    sent = [(b.input_ids, b.sampling.max_new_tokens, b.sampling.min_new_tokens) for b in server.bodies]
    assert sent == [
        ([7, 8], 6, 4),
        ([7, 8, 10, 11], 4, 2),
        ([7, 8, 10, 11], 4, 2),
        ([7, 8, 10, 11, 12], 3, 1),
    ]
    assert [b.sampling.seed for b in server.bodies] == [5, mix(5, 2), mix(5, 2), mix(5, 3)]
    assert len({b.rid for b in server.bodies}) == 4


async def test_a_version_that_changes_within_a_segment_is_kept_per_token(server: Any, wire: Any) -> None:
    spans = [VersionSpan(version=0, start=0, end=1), VersionSpan(version=1, start=1, end=3)]
    server.script = _script(wire.output([1, 2, 3]).model_copy(update={"spans": spans}))
    async with _engine(wire, server) as (engine, _):
        assert (await engine.agenerate(_request())).output_versions == [0, 1, 1]


async def test_abort_never_leaves_the_client(server: Any, wire: Any) -> None:
    server.script = _script(wire.output([1] * 6, StopReason.ABORT))
    async with _engine(wire, server) as (engine, _):
        assert (await engine.agenerate(_request())).stop_reason is StopReason.LENGTH


async def test_a_stop_string_across_the_cut(server: Any, wire: Any) -> None:
    server.script = _script(
        wire.output(list(map(ord, "abE")), StopReason.ABORT), wire.output(list(map(ord, "NDx")), StopReason.LENGTH)
    )
    async with _engine(wire, server) as (engine, _):
        response = await engine.agenerate(_request(stop=("END",)))
        assert (decode(response.output_tokens), response.stop_reason) == ("ab", StopReason.STOP)
        assert len(response.output_logprobs) == len(response.output_versions) == 2


async def test_the_context_bounds_the_budget(server: Any, wire: Any) -> None:
    async with _engine(wire, server) as (engine, _):
        response = await engine.agenerate(_request(prompt=[1] * 61))
        assert response.output_len == 3
        with pytest.raises(RequestError, match="context_length = 64"):
            await engine.agenerate(_request(prompt=[1] * 64))
        with pytest.raises(RequestError, match="empty"):
            await engine.agenerate(_request(prompt=[]))
    assert len(server.bodies) == 1


async def test_a_refused_request_is_final(server: Any, wire: Any) -> None:
    server.script = _script(wire.refusal(400, "token id 99999 is out of range"))
    async with _engine(wire, server) as (engine, pool):
        with pytest.raises(RequestError, match="400: Refused: token id 99999 is out of range"):
            await engine.agenerate(_request())
        assert len(server.bodies) == 1
        assert pool.statistics().in_rotation == 1
        now = engine.statistics()
        assert (now.requests, now.refused, now.failed, now.retries, now.in_flight) == (1, 1, 0, 0, 0)


@pytest.mark.parametrize("status", [401, 404, 413, 422])
async def test_other_client_errors_are_final_too(server: Any, wire: Any, status: int) -> None:
    server.script = _script(wire.refusal(status, "no"))
    async with _engine(wire, server) as (engine, _):
        with pytest.raises(RequestError, match=str(status)):
            await engine.agenerate(_request())
    assert len(server.bodies) == 1


async def test_a_server_error_moves_the_request(new_server: New, wire: Any) -> None:
    a, b = await new_server("a"), await new_server("b")
    a.script = _script(web.Response(status=500, text="boom"))
    async with _engine(wire, a, b) as (engine, _):
        assert (await engine.agenerate(_request())).server == "b"
        assert engine.statistics().retries == 1
    assert (len(a.bodies), len(b.bodies)) == (1, 1)
    assert b.bodies[0].sampling.seed == 5


async def test_what_was_written_before_a_failure_is_kept(new_server: New, wire: Any) -> None:
    a, b = await new_server("a"), await new_server("b")
    a.script = _script(wire.output([10, 11], StopReason.ABORT), web.Response(status=500))
    b.script = _script(wire.output([12], version=4))
    async with _engine(wire, a, b) as (engine, _):
        response = await engine.agenerate(_request())
    assert (response.output_tokens, response.output_versions) == ([10, 11, 12], [0, 0, 4])
    assert b.bodies[0].input_ids == [7, 8, 10, 11]


async def test_tries_are_bounded(server: Any, wire: Any) -> None:
    async def boom(body: GenerateBody) -> web.Response:
        return web.Response(status=500, text="boom")

    server.script = boom
    async with _engine(wire, server) as (engine, _):
        with pytest.raises(ServerUnavailable, match=r"request r: 4 tries failed; the last: s0 /generate: 500: boom"):
            await engine.agenerate(_request())
        assert engine.statistics().failed == 1
    assert len(server.bodies) == 4


async def test_a_busy_server_costs_time_but_no_tries(server: Any, wire: Any) -> None:
    server.script = _script(*[wire.refusal(503, "paused") for _ in range(6)], wire.output([1]))
    async with _engine(wire, server) as (engine, _):
        assert (await engine.agenerate(_request())).output_tokens == [1]


class Closable(EmbeddedDialect):
    """``asked`` is set when somebody was told that it is closed."""

    def __init__(self) -> None:
        self.reason, self.asked = "an update is under way", asyncio.Event()

    def closed(self) -> str:
        if self.reason:
            self.asked.set()
        return self.reason


async def test_a_closed_server_is_asked_for_nothing_until_it_opens(server: Any, wire: Any) -> None:
    """Hundreds of answers that an update has cut come back while it stands still: no body is made for any in vain."""
    server.script = _script(wire.output([1]))
    dialect = Closable()
    async with ServerPool() as pool, RemoteEngine(pool, token=wire.TOKEN, retry=FAST) as engine:
        control = EmbeddedControl(server.name, server.url, token=wire.TOKEN)
        await pool.add(server.name, server.url, control, dialect)
        pool.acknowledge(server.receipt())
        answer = asyncio.create_task(engine.agenerate(_request()))
        await dialect.asked.wait()
        dialect.reason = ""
        assert (await answer).output_tokens == [1]
        statistics = engine.statistics()
    assert (statistics.segments, statistics.failed) == (1, 0)
    assert statistics.retries >= 1
    assert [body.rid for body in server.bodies] == ["r.1"]


@pytest.mark.parametrize("how", ["busy", "cut"])
async def test_an_update_that_is_over_is_not_slept_through(server: Any, wire: Any, how: str) -> None:
    asked = asyncio.Event()
    server.health = server.health.model_copy(update={"version": 10**6})  # as new as any receipt here
    first = wire.refusal(503, "updating") if how == "busy" else wire.output([], StopReason.ABORT)

    async def script(body: Any) -> Any:
        if asked.is_set():
            return wire.output([1], version=10**6)
        asked.set()
        return first

    server.script = script
    async with _engine(wire, server, timeout=300.0, retry=RetryPolicy(first=50.0, limit=50.0)) as (engine, pool):
        answer = asyncio.create_task(engine.agenerate(_request()))
        await asked.wait()
        acknowledging = asyncio.create_task(_acknowledge_until(pool, server, answer))
        assert (await asyncio.wait_for(answer, 10.0)).output_tokens == [1]
        await acknowledging


async def _acknowledge_until(pool: Any, server: Any, answer: asyncio.Task[Any]) -> None:
    """Receipts until the answer is there: it may not have been waiting yet when the first one came."""
    version = 0
    while not answer.done():
        version += 1
        pool.acknowledge(server.receipt(version))
        await asyncio.wait({answer}, timeout=0.05)


async def test_an_answer_of_older_weights_than_acknowledged_is_never_used(new_server: New, wire: Any) -> None:
    """Its server was started again behind our back, or obeys another run: the request moves before health tells."""
    a, b = await new_server("a"), await new_server("b")
    a.script = _script(wire.output([3, 4], version=1))
    b.script = _script(wire.output([5, 6], version=2))
    async with _engine(wire, a, b) as (engine, pool):
        pool.acknowledge(a.receipt(version=2))
        pool.acknowledge(b.receipt(version=2))
        for server in (a, b):
            server.health = server.health.model_copy(update={"version": 2})
        response = await engine.agenerate(_request())
        assert (response.output_tokens, response.output_versions) == ([5, 6], [2, 2])
        assert engine.statistics().retries == 1


async def test_a_server_that_is_busy_for_ever_ends_at_the_deadline(server: Any, wire: Any) -> None:
    async def busy(body: GenerateBody) -> web.Response:
        return wire.refusal(503, "paused")  # type: ignore[no-any-return]

    server.script = busy
    async with _engine(wire, server, timeout=0.5) as (engine, _):
        with pytest.raises(ServerUnavailable, match="paused"):
            await engine.agenerate(_request())


@pytest.mark.parametrize(
    "answer",
    [
        web.Response(text="not json"),
        web.json_response({"rid": "other", "outputs": [], "seconds_to_first_token": 0, "seconds": 0}),
        GenerateOutput(token_ids=[1, 2], logprobs=[0.0], spans=[], stop_reason=StopReason.STOP),
    ],
)
async def test_a_malformed_answer_is_never_returned(new_server: New, wire: Any, answer: Any) -> None:
    a, b = await new_server("a"), await new_server("b")
    a.script = _script(answer)
    async with _engine(wire, a, b) as (engine, _):
        assert (await engine.agenerate(_request())).server == "b"


async def test_a_broken_connection_moves_the_request_and_ejects_the_dead(new_server: New, wire: Any) -> None:
    a, b = await new_server("a"), await new_server("b")
    await a.stop()
    async with _engine(wire, b) as (engine, pool):
        await a.start(a.port)
        await pool.add("a", a.url, EmbeddedControl("a", a.url, token=wire.TOKEN))
        pool.acknowledge(a.receipt())
        await a.stop()
        responses = await asyncio.gather(*(engine.agenerate(_request()) for _ in range(8)))
        assert {r.server for r in responses} == {"b"}
        async with asyncio.timeout(5):
            while pool.statistics().in_rotation > 1:
                await pool.changed()


async def test_requests_at_an_ejected_server_move(new_server: New, wire: Any) -> None:
    a, b = await new_server("a"), await new_server("b")
    reached = asyncio.Event()

    async def hang(body: GenerateBody) -> Any:
        reached.set()
        await asyncio.Event().wait()

    a.script = hang
    async with _engine(wire, a, b) as (engine, pool):
        task = asyncio.create_task(engine.agenerate(_request()))
        await reached.wait()
        pool.eject("a", "half-applied weights")
        assert (await task).server == "b"


async def test_no_server_within_the_deadline(server: Any, wire: Any) -> None:
    async with _engine(wire, server, timeout=0.05) as (engine, pool):
        pool.eject("s0", "decode loop died")
        with pytest.raises(NoServerAvailable, match=r"s0 is ejected \(decode loop died\)"):
            await engine.agenerate(_request())


async def test_a_request_waits_for_the_first_server(server: Any, wire: Any) -> None:
    async with _engine(wire, server) as (engine, pool):
        pool.eject("s0", "away")
        task = asyncio.create_task(engine.agenerate(_request()))
        await asyncio.sleep(0)
        pool.acknowledge(server.receipt())
        assert (await task).server == "s0"


async def test_a_hung_server_ends_at_the_deadline_and_is_told(server: Any, wire: Any) -> None:
    async def hang(body: GenerateBody) -> Any:
        await asyncio.Event().wait()

    server.script = hang
    async with _engine(wire, server, timeout=0.1) as (engine, _):
        with pytest.raises(ServerUnavailable, match=r"s0 did not answer within 0\.1 s"):
            await engine.agenerate(_request())
        async with asyncio.timeout(5):
            await server.abort_seen.wait()
    assert server.aborted == ["r.1"]


async def test_a_cancelled_request_is_cut_at_its_server(server: Any, wire: Any) -> None:
    reached = asyncio.Event()

    async def hang(body: GenerateBody) -> Any:
        reached.set()
        await asyncio.Event().wait()

    server.script = hang
    async with _engine(wire, server) as (engine, pool):
        task = asyncio.create_task(engine.agenerate(_request()))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(5):
            await server.abort_seen.wait()
        assert server.aborted == ["r.1"]
        assert (pool.statistics().in_flight, engine.statistics().in_flight) == (0, 0)


async def test_an_answer_from_before_a_restore_is_refused(server: Any, wire: Any) -> None:
    async with _engine(wire, server) as (engine, pool):

        async def restored(body: GenerateBody) -> GenerateOutput:
            pool.acknowledge(server.receipt(version=0, incarnation=1))
            return wire.output([1])  # type: ignore[no-any-return]

        server.script = restored
        with pytest.raises(ServerUnavailable, match="belongs to the past"):
            await engine.agenerate(_request())


async def test_answers_cut_without_progress_do_not_spin(server: Any, wire: Any) -> None:
    async def cut(body: GenerateBody) -> GenerateOutput:
        return wire.output([], StopReason.ABORT)  # type: ignore[no-any-return]

    server.script = cut
    async with _engine(wire, server, timeout=0.3, retry=RetryPolicy(first=0.05, limit=0.05)) as (engine, _):
        with pytest.raises(ServerUnavailable, match="did not answer"):
            await engine.agenerate(_request())
    assert 0 < len(server.bodies) < 14


async def test_every_try_counts_anew_after_progress(server: Any, wire: Any) -> None:
    boom = [web.Response(status=500) for _ in range(6)]
    server.script = _script(*boom[:3], wire.output([1], StopReason.ABORT), *boom[3:], wire.output([2]))
    async with _engine(wire, server) as (engine, _):
        assert (await engine.agenerate(_request())).output_tokens == [1, 2]


async def test_concurrent_requests_share_nothing(server: Any, wire: Any) -> None:
    async def echo(body: GenerateBody) -> GenerateOutput:
        await asyncio.sleep(0)
        return wire.output([body.input_ids[0]] * body.sampling.max_new_tokens)  # type: ignore[no-any-return]

    server.script = echo
    gconfig = GenerationHyperparameters(max_new_tokens=4)
    async with _engine(wire, server) as (engine, _):
        requests = [ModelRequest(input_ids=[i], gconfig=gconfig) for i in range(50)]
        responses = await asyncio.gather(*map(engine.agenerate, requests))
    assert [r.output_tokens for r in responses] == [[i] * 4 for i in range(50)]
    assert len({b.rid for b in server.bodies}) == 50


async def test_a_thousand_requests_are_in_flight_at_once(server: Any, wire: Any) -> None:
    count = 1024
    everyone = asyncio.Event()

    async def wait(body: GenerateBody) -> GenerateOutput:
        if server.in_flight == count:
            everyone.set()
        await everyone.wait()
        return wire.output([1])  # type: ignore[no-any-return]

    server.script = wait
    async with _engine(wire, server, timeout=60) as (engine, pool):
        responses = await asyncio.gather(*(engine.agenerate(_request()) for _ in range(count)))
        assert len(responses) == count
        assert server.peak == count
        assert engine.statistics() == replace(
            engine.statistics(), requests=count, finished=count, stopped=count, tokens=count, segments=count, retries=0
        )
        assert pool.statistics().servers[0].dispatched == count


async def test_errors_of_the_body_pass_unwrapped(server: Any, wire: Any) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with _engine(wire, server):
            raise KeyError("mine")
