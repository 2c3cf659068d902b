"""What the client and the weight channel do when real servers die, hang or get wrong weights."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from areal_like.api.generation import GenerationHyperparameters, ModelRequest, ModelResponse, StopReason
from areal_like.api.weights import InterruptMode
from areal_like.client.control import EmbeddedControl
from areal_like.client.server import ServerState
from areal_like.errors import (
    NoServerAvailable,
    ReachedNoServer,
    RequestError,
    ServerUnavailable,
    StaleCommand,
    WeightUpdateError,
)
from areal_like.weights.segments import segment_path
from launcher.incarnations import claim_incarnation

Start = Callable[..., list[Any]]

#: tokens of an answer that takes long enough to be hit in the middle
LONG = 700


def _request(tokens: int, prompt: int = 5, **gconfig: object) -> ModelRequest:
    asked = GenerationHyperparameters.model_validate({"max_new_tokens": tokens, "ignore_eos": True, **gconfig})
    return ModelRequest(input_ids=[prompt, 6, 7], gconfig=asked, seed=1)


async def _in_flight(cluster: Any, name: str, count: int = 1) -> None:
    """Until ``name`` itself says that it decodes ``count`` requests."""
    control = cluster.pool.weight_server(name)
    async with asyncio.timeout(20):
        while (await control.health(timeout=5)).in_flight < count:  # noqa: ASYNC110 - another process sets no event
            await asyncio.sleep(0)


def _logprobs(model: Any, response: ModelResponse) -> list[float]:
    """Teacher forcing in float32 with the plain model."""
    ids = torch.tensor([[*response.input_tokens, *response.output_tokens]])
    with torch.no_grad():
        rows = torch.log_softmax(model(ids).logits[0].float(), dim=-1)
    first = response.input_len - 1
    return [float(rows[first + t, token]) for t, token in enumerate(response.output_tokens)]


async def test_versions_reach_every_server_and_requests_in_flight_carry_both(
    start_servers: Start, open_cluster: Any
) -> None:
    async with open_cluster(*start_servers("a", "b")) as cluster:
        await cluster.channel.publish(0)
        assert cluster.engine.get_version() == 0
        whole = await cluster.engine.agenerate(_request(16))
        assert whole.output_logprobs == pytest.approx(_logprobs(cluster.trainer.models[0], whole), abs=1e-4)
        long = [asyncio.create_task(cluster.engine.agenerate(_request(LONG, prompt=p))) for p in (8, 9)]
        for name in ("a", "b"):
            await _in_flight(cluster, name)
        receipts = await cluster.channel.publish(1)
        assert [r.server for r in receipts] == ["a", "b"]
        assert {r.digest for r in receipts} == {cluster.channel.manifest.digest}
        assert cluster.engine.get_version() == 1
        for response in await asyncio.gather(*long):
            assert response.output_len == len(response.output_versions) == LONG
            assert set(response.output_versions) == {0, 1}
            assert response.output_versions == sorted(response.output_versions)
        fresh = await cluster.engine.agenerate(_request(16))
        assert set(fresh.output_versions) == {1}
        assert fresh.output_logprobs == pytest.approx(_logprobs(cluster.trainer.models[1], fresh), abs=1e-4)

        # an abort from outside is stitched: budget and versions as if nothing had happened
        task = asyncio.create_task(cluster.engine.agenerate(_request(LONG)))
        while not cluster.pool.statistics().in_flight:  # noqa: ASYNC110 - a turn or two of the loop
            await asyncio.sleep(0)
        (name,) = [s.name for s in cluster.pool.statistics().servers if s.in_flight]
        await _in_flight(cluster, name)
        assert await cluster.pool.weight_server(name).abort([], timeout=5) == 1
        response = await task
        assert (response.output_len, response.interruptions) == (LONG, 1)
        assert (response.stop_reason, set(response.output_versions)) == (StopReason.LENGTH, {1})
        assert response.output_logprobs == pytest.approx(_logprobs(cluster.trainer.models[1], response), abs=1e-3)

        with pytest.raises(RequestError, match="400"):
            await cluster.engine.agenerate(ModelRequest(input_ids=[100_000]))
    assert cluster.channel.statistics().versions_published == 2


async def test_a_killed_server_loses_no_request(start_servers: Start, open_cluster: Any) -> None:
    a, b = start_servers("a", "b")
    async with open_cluster(a, b) as cluster:
        await cluster.channel.publish(0)
        tasks = [asyncio.create_task(cluster.engine.agenerate(_request(LONG, prompt=p))) for p in range(2, 10)]
        await _in_flight(cluster, "a", 4)
        a.send(signal.SIGKILL)
        responses = await asyncio.gather(*tasks)
        assert {r.server for r in responses} == {"b"}
        assert all(r.output_len == LONG for r in responses)
        async with asyncio.timeout(10):
            while cluster.pool.statistics().in_rotation > 1:
                await cluster.pool.changed()
        receipts = await cluster.channel.publish(1)
        assert [r.server for r in receipts] == ["b"]

        b.send(signal.SIGKILL)
        async with asyncio.timeout(10):
            while cluster.pool.statistics().in_rotation:
                await cluster.pool.changed()
        with pytest.raises(WeightUpdateError, match="none was in rotation"):
            await cluster.channel.publish(2)
    async with open_cluster() as empty, asyncio.timeout(5):
        empty.engine._timeout = 0.1
        with pytest.raises(NoServerAvailable, match=r"within 0\.1 s"):
            await empty.engine.agenerate(_request(4))


async def test_a_stalled_server_is_ejected_by_the_publication_and_comes_back_with_the_current_version(
    start_servers: Start, open_cluster: Any
) -> None:
    a, b = start_servers("a", "b")
    async with open_cluster(a, b, update_timeout=2.0, health=60.0) as cluster:
        await cluster.channel.publish(0)
        a.send(signal.SIGSTOP)
        async with asyncio.timeout(15):
            receipts = await cluster.channel.publish(1)
        assert [r.server for r in receipts] == ["b"]
        records = {s.name: s for s in cluster.pool.statistics().servers}
        assert records["a"].state is ServerState.EJECTED
        assert "version 1 did not end within 2 s" in records["a"].reason
        assert cluster.engine.get_version() == 1
        await cluster.channel.publish(2)

        readmitting = asyncio.create_task(cluster.channel.readmit_recovered())
        a.send(signal.SIGCONT)
        async with asyncio.timeout(15):
            while cluster.pool.statistics().in_rotation < 2:
                await cluster.pool.changed()
        readmitting.cancel()
        assert {s.version for s in cluster.pool.statistics().servers} == {2}
        answer = await cluster.pool.weight_server("a").digest(timeout=5)
        assert (answer.version, answer.digest) == (2, cluster.channel.manifest.digest)


@pytest.mark.parametrize("asked", [False, True], ids=["idle", "in mid-request"])
async def test_the_only_server_is_waited_for_and_gets_the_newest_version(
    start_servers: Start, open_cluster: Any, asked: bool
) -> None:
    """Killed, and started again at its address by somebody else: requests wait, and its own weights never count."""
    (a,) = start_servers("a")
    async with open_cluster(a) as cluster, asyncio.timeout(90):
        await cluster.channel.publish(0)
        await cluster.channel.publish(1)
        answer = asyncio.create_task(cluster.engine.agenerate(_request(LONG if asked else 16)))
        if asked:
            await _in_flight(cluster, "a")
        else:
            await answer
        a.end()
        with pytest.raises(ReachedNoServer, match="version 2 reached no server"):
            await cluster.channel.publish(2)
        readmitting = asyncio.create_task(cluster.channel.readmit_recovered())
        waiting = asyncio.create_task(cluster.pool.regained(2, 60))
        await asyncio.to_thread(start_servers, "a", port=int(a.url.rpartition(":")[2]))
        assert await waiting
        readmitting.cancel()
        record = cluster.pool.statistics().servers[0]
        assert (record.state, record.version) == (ServerState.IN_ROTATION, 2)
        told = await cluster.pool.weight_server("a").digest(timeout=5)
        assert (told.version, told.digest) == (2, cluster.channel.manifest.digest)
        assert set((await answer).output_versions) <= {1, 2}
        assert set((await cluster.engine.agenerate(_request(16))).output_versions) == {2}


async def test_a_server_started_again_between_two_questions_writes_nothing_that_counts(
    start_servers: Start, open_cluster: Any
) -> None:
    """It answers at once, under the weights that it was started with; its next health question is far away."""
    (a,) = start_servers("a")
    async with open_cluster(a, interval=3600.0) as cluster, asyncio.timeout(90):
        await cluster.channel.publish(0)
        await cluster.channel.publish(1)
        a.end()
        await asyncio.to_thread(start_servers, "a", port=int(a.url.rpartition(":")[2]))
        readmitting = asyncio.create_task(cluster.channel.readmit_recovered())
        answer = await cluster.engine.agenerate(_request(16))
        readmitting.cancel()
        assert set(answer.output_versions) == {1}
        assert answer.output_logprobs == pytest.approx(_logprobs(cluster.trainer.models[1], answer), abs=1e-4)


async def test_runs_that_join_at_once_share_no_incarnation(start_servers: Start) -> None:
    servers = start_servers("a", "b")
    controls = [EmbeddedControl(s.name, s.url, token="faults-token") for s in servers]
    runs = [f"run-{i}" for i in range(4)]
    given = await asyncio.gather(*(claim_incarnation(controls, run_id=run, timeout=20) for run in runs))
    assert len(set(given)) == len(runs)
    newest, winner = max(zip(given, runs, strict=True))
    assert {(await control.health(timeout=20)).incarnation for control in controls} == {newest}
    for control in controls:
        await control.claim(incarnation=newest, run_id=winner, timeout=20)  # its answer may have been lost
        for number, run in ((newest, "another"), (newest - 1, winner)):
            with pytest.raises(StaleCommand, match=f"the newest is {newest}"):
                await control.claim(incarnation=number, run_id=run, timeout=20)
        for number in sorted(set(given) - {newest}):  # whoever has an older one is refused from here on
            with pytest.raises(StaleCommand):
                await control.pause(incarnation=number, mode=InterruptMode.KEEP, timeout=20)
        await control.aclose()


async def test_a_server_that_hangs_in_mid_request_hands_it_over(start_servers: Start, open_cluster: Any) -> None:
    a, b = start_servers("a", "b")
    async with open_cluster(a, b) as cluster:
        await cluster.channel.publish(0)
        tasks = [asyncio.create_task(cluster.engine.agenerate(_request(LONG, prompt=p))) for p in (2, 3)]
        await _in_flight(cluster, "a")
        a.send(signal.SIGSTOP)
        assert {r.server for r in await asyncio.gather(*tasks)} == {"b"}


async def test_damaged_weights_never_become_live(
    start_servers: Start, open_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,) = start_servers("a")
    async with open_cluster(a) as cluster:
        await cluster.channel.publish(0)
        before = await cluster.pool.weight_server("a").digest(timeout=5)
        export = cluster.trainer.export_weights

        async def damaged(version: int, incarnation: int) -> Any:
            manifest = await export(version, incarnation)
            path = segment_path(manifest.location)
            raw = bytearray(path.read_bytes())
            raw[-100] ^= 1
            with path.open("r+b") as file:
                file.write(raw)
            return manifest

        monkeypatch.setattr(type(cluster.trainer), "export_weights", staticmethod(damaged))
        with pytest.raises(WeightUpdateError, match=r"a: stage of version 1 failed.*its bytes have digest"):
            await cluster.channel.publish(1)
        control = EmbeddedControl("a", a.url, token="faults-token")
        assert await control.digest(timeout=5) == before
        assert (await control.health(timeout=5)).version == 0
        stale = await export(1, 0)
        await export(2, 0)
        await export(3, 0)
        with pytest.raises(WeightUpdateError, match="no longer holds version 1"):
            await control.stage(stale, timeout=5)
        with pytest.raises(ServerUnavailable, match="no answer within"):
            a.send(signal.SIGSTOP)
            await control.stage(stale, timeout=0.2)
        await control.aclose()
