from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.client.control import EmbeddedControl
from areal_like.client.pool import ServerPool
from areal_like.client.server import ServerState
from areal_like.errors import ConfigError, ServersTaken, ServerUnavailable

New = Callable[[str], Awaitable[Any]]


async def _until(pool: ServerPool, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await pool.changed()


def _route(pool: ServerPool, session: str | None = None) -> str | None:
    return pool.route(session_id=session, group_id=None)


async def test_a_server_gets_requests_only_after_its_first_receipt(server: Any, wire: Any) -> None:
    async with ServerPool(wire.QUICK) as pool:
        assert (pool.context_length, pool.lowest_version) == (None, -1)
        await pool.add("s0", server.url, EmbeddedControl("s0", server.url, token=wire.TOKEN))
        assert pool.context_length == 64
        assert _route(pool) is None
        assert list(pool.publication_targets()) == ["s0"]
        pool.acknowledge(server.receipt(version=2))
        assert _route(pool) == "s0"
        assert pool.lowest_version == 2
        (record,) = pool.statistics().servers
        assert (record.name, record.state, record.version) == ("s0", ServerState.IN_ROTATION, 2)


async def test_a_server_that_does_not_answer_cannot_join(server: Any, wire: Any) -> None:
    async with ServerPool(wire.QUICK) as pool:
        server.health = server.health.model_copy(update={"status": "failed", "reason": "no memory"})
        with pytest.raises(ServerUnavailable, match="no memory"):
            await pool.add("s0", server.url, EmbeddedControl("s0", server.url, token=wire.TOKEN))


async def test_a_name_is_taken_once(server: Any, wire: Any) -> None:
    async with wire.pool_of(server) as pool:
        with pytest.raises(ValueError, match="in the pool already"):
            await pool.add("s0", server.url, EmbeddedControl("s0", server.url, token=wire.TOKEN))


async def test_the_lowest_version_counts_servers_in_rotation_and_never_falls(new_server: New, wire: Any) -> None:
    a, b = await new_server("a"), await new_server("b")
    async with wire.pool_of(a, b) as pool:
        pool.acknowledge(a.receipt(version=1))
        assert pool.lowest_version == 0
        pool.acknowledge(b.receipt(version=1))
        assert pool.lowest_version == 1
        pool.acknowledge(a.receipt(version=2))
        pool.eject("b", "stalled")
        assert pool.lowest_version == 2
        pool.eject("a", "stalled")
        assert pool.lowest_version == 2
        pool.acknowledge(b.receipt(version=1))
        assert pool.lowest_version == 2


async def test_a_new_incarnation_rewinds_and_waits_for_every_receipt(new_server: New, wire: Any) -> None:
    a, b = await new_server("a"), await new_server("b")
    async with wire.pool_of(a, b) as pool:
        for server in (a, b):
            pool.acknowledge(server.receipt(version=9))
        pool.acknowledge(a.receipt(version=4, incarnation=1))
        assert (pool.incarnation, pool.lowest_version) == (1, 4)
        assert _route(pool) == "a"
        assert [s.state for s in pool.statistics().servers] == [ServerState.IN_ROTATION, ServerState.JOINING]
        pool.acknowledge(b.receipt(version=10, incarnation=0))
        assert pool.statistics().servers[1].state is ServerState.JOINING
        pool.acknowledge(b.receipt(version=4, incarnation=1))
        assert pool.lowest_version == 4


async def test_waiting_for_a_change_wakes_without_polling(server: Any, wire: Any) -> None:
    async with wire.pool_of(server) as pool:
        waiter = asyncio.create_task(_until(pool, lambda: pool.lowest_version == 1))
        await asyncio.sleep(0)
        pool.acknowledge(server.receipt(version=1))
        await waiter


async def test_in_flight_requests_are_counted(server: Any, wire: Any) -> None:
    async with wire.pool_of(server) as pool:
        deadline = asyncio.get_running_loop().time() + 5
        async with pool.lease("s0", deadline) as url, pool.lease("s0", deadline):
            assert url == server.url
            assert pool.statistics().in_flight == 2
        record = pool.statistics().servers[0]
        assert (record.in_flight, record.dispatched) == (0, 2)


async def test_an_ejection_ends_the_requests_in_flight(server: Any, wire: Any) -> None:
    async with wire.pool_of(server) as pool:
        with pytest.raises(ServerUnavailable, match="left the rotation: weights differ"):
            async with pool.lease("s0", asyncio.get_running_loop().time() + 60):
                pool.eject("s0", "weights differ")
                await asyncio.Event().wait()
        assert pool.statistics().in_flight == 0
        with pytest.raises(ServerUnavailable, match="not in rotation"):
            async with pool.lease("s0", asyncio.get_running_loop().time() + 60):
                raise AssertionError


async def test_a_deadline_is_not_mistaken_for_an_ejection(server: Any, wire: Any) -> None:
    async with wire.pool_of(server) as pool:
        with pytest.raises(TimeoutError):
            async with pool.lease("s0", asyncio.get_running_loop().time()):
                await asyncio.Event().wait()


async def test_a_dead_server_is_ejected_with_the_reason(new_server: New, wire: Any) -> None:
    a, b = await new_server("a"), await new_server("b")
    async with wire.pool_of(a, b) as pool:
        await a.stop()
        pool.suspect("a")
        assert _route(pool) == "b"
        await _until(pool, lambda: pool.statistics().in_rotation == 1)
        record = pool.statistics().servers[0]
        assert record.state is ServerState.EJECTED
        assert "2 health questions in a row failed" in record.reason
        assert (pool.statistics().ejections, record.ejections) == (1, 1)


async def test_a_server_that_hangs_is_ejected(server: Any, wire: Any) -> None:
    async def hang() -> Any:
        await asyncio.Event().wait()

    async with wire.pool_of(server, policy=replace(wire.QUICK, timeout=0.02)) as pool:
        server.other["/health"] = hang
        await _until(pool, lambda: pool.statistics().in_rotation == 0)
        assert "no answer within 0.02 s" in pool.statistics().servers[0].reason


async def test_a_suspect_that_answers_is_cleared(server: Any, wire: Any) -> None:
    async with wire.pool_of(server) as pool:
        pool.suspect("s0")
        assert _route(pool) is None
        await _until(pool, lambda: _route(pool) == "s0")


async def test_a_server_that_reports_failure_leaves_at_once(server: Any, wire: Any) -> None:
    async with wire.pool_of(server) as pool:
        server.health = server.health.model_copy(update={"status": "failed", "reason": "decode loop died"})
        await _until(pool, lambda: pool.statistics().in_rotation == 0)
        assert pool.statistics().servers[0].reason == "it reports: decode loop died"


async def test_a_server_restarted_with_old_weights_leaves_and_is_offered_for_readmission(
    server: Any, wire: Any
) -> None:
    async with wire.pool_of(server) as pool:
        pool.acknowledge(server.receipt(version=3))
        await _until(pool, lambda: pool.statistics().in_rotation == 0)
        assert "it was restarted" in pool.statistics().servers[0].reason
        async with asyncio.timeout(5):
            assert await pool.next_recovered() == "s0"
        server.health = server.health.model_copy(update={"version": 3})
        pool.acknowledge(server.receipt(version=3))
        assert _route(pool) == "s0"


async def test_a_server_that_obeys_another_run_leaves_for_good(new_server: New, wire: Any) -> None:
    a, b = await new_server("a"), await new_server("b")
    async with wire.pool_of(a, b) as pool:
        pool.command(3)
        for server in (a, b):
            server.health = server.health.model_copy(update={"incarnation": 3})
        await pool.look_at_all()
        assert pool.statistics().in_rotation == 2  # our own calls came to them
        a.health = a.health.model_copy(update={"incarnation": 4, "version": 9})
        await pool.look_at_all()
        record = pool.statistics().servers[0]
        assert (record.state, record.reason) == (ServerState.EJECTED, "another run (incarnation 4) has taken it over")
        pool.check_taken()  # the run goes on with the other
        a.health = a.health.model_copy(update={"incarnation": 0})  # started anew, by whoever uses it now
        await pool.look_at_all()
        assert not pool._servers["a"].offered
        b.health = b.health.model_copy(update={"incarnation": 5})
        await pool.look_at_all()
        told = rf"taken over {a.url} \(by incarnation 4\), {b.url} \(by incarnation 5\); this run is incarnation 3"
        with pytest.raises(ServersTaken, match=told):
            pool.check_taken()


async def test_a_server_that_was_started_again_is_spoken_to_anew(server: Any, wire: Any) -> None:
    """What a control and a dialect remember is of the server before: a version that the new one never loaded."""
    links = []

    async def relink() -> Any:
        links.append(SimpleNamespace(control=EmbeddedControl("s0", server.url, token=wire.TOKEN), dialect=object()))
        return links[-1]

    async with ServerPool(wire.QUICK) as pool:
        await pool.add("s0", server.url, EmbeddedControl("s0", server.url, token=wire.TOKEN), relink=relink)
        first = pool.weight_server("s0")
        pool.acknowledge(server.receipt())
        pool.eject("s0", "stalled")
        await pool.next_recovered()
        assert pool.weight_server("s0") is first  # the same server still
        server.health = server.health.model_copy(update={"version": 3})
        pool.acknowledge(server.receipt(version=3))
        server.health = server.health.model_copy(update={"version": -1, "context_length": 32})
        await pool.next_recovered()
        assert (pool.weight_server("s0"), pool.dialect("s0")) == (links[0].control, links[0].dialect)
        assert pool.context_length == 32


async def test_the_only_server_is_waited_for_while_nothing_answers(server: Any, wire: Any) -> None:
    async with wire.pool_of(server) as pool:
        port = server.port
        await server.stop()
        waiting = asyncio.create_task(pool.regained(1, 60))
        await _until(pool, lambda: pool.statistics().in_rotation == 0)
        for _ in range(3):  # refused again and again, and gone in between
            pool._servers["s0"].offered = True
            pool.eject("s0", "it died on the way")
            await pool.look_at_all()
        assert not waiting.done()
        await server.start(port)
        async with asyncio.timeout(5):
            await pool.next_recovered()
        pool.acknowledge(server.receipt(version=0))
        await asyncio.sleep(0)
        assert not waiting.done()  # with older weights it is not what is waited for
        pool.acknowledge(server.receipt(version=1))
        assert await waiting


async def test_a_server_that_answers_and_takes_nothing_is_given_up(server: Any, wire: Any) -> None:
    async def relink() -> Any:
        raise ConfigError("another engine answers there")

    async with ServerPool(wire.QUICK) as pool:
        await pool.add("s0", server.url, EmbeddedControl("s0", server.url, token=wire.TOKEN), relink=relink)
        pool.eject("s0", "stage failed")
        async with asyncio.timeout(5):
            assert not await pool.regained(0, 60)
        assert "s0 is ejected (it was started again, and cannot join: another engine" in pool.whereabouts()


async def test_what_does_not_come_back_in_time_is_given_up(server: Any, wire: Any) -> None:
    async with wire.pool_of(server) as pool:
        await server.stop()
        pool.eject("s0", "stage failed")
        assert not await pool.regained(0, 0.01)


async def test_our_own_newer_incarnation_is_no_other_run(server: Any, wire: Any) -> None:
    async with wire.pool_of(server) as pool:
        pool.command(0)
        pool.acknowledge(server.receipt(version=1, incarnation=1))
        server.health = server.health.model_copy(update={"incarnation": 1, "version": 1})
        await pool.look_at_all()
        assert pool.statistics().in_rotation == 1


async def test_a_server_that_is_readmitted_otherwise_is_not_offered(new_server: New, wire: Any) -> None:
    a, b = await new_server("a"), await new_server("b")
    async with wire.pool_of(a, b) as pool:
        pool.eject("a", "stalled")
        while not pool._servers["a"].offered:
            a.asked_health.clear()
            await a.asked_health.wait()
        pool.acknowledge(a.receipt())
        pool.eject("b", "stalled")
        async with asyncio.timeout(5):
            assert await pool.next_recovered() == "b"


async def test_a_server_out_for_its_pause_is_not_offered(server: Any, wire: Any) -> None:
    async with wire.pool_of(server, policy=replace(wire.QUICK, interval=0.001, readmit_after=60)) as pool:
        pool.eject("s0", "stalled")
        for _ in range(5):
            server.asked_health.clear()
            await server.asked_health.wait()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await pool.next_recovered()


async def test_a_removed_server_is_forgotten(server: Any, wire: Any) -> None:
    async with wire.pool_of(server) as pool:
        with pytest.raises(ServerUnavailable, match="left the rotation: replaced"):
            async with pool.lease("s0", asyncio.get_running_loop().time() + 60):
                await pool.remove("s0", "replaced")
                await asyncio.Event().wait()
        assert pool.statistics().servers == ()
        with pytest.raises(ServerUnavailable, match="no server named 's0'"):
            pool.weight_server("s0")
        for late in (lambda: pool.eject("s0", "x"), lambda: pool.acknowledge(server.receipt())):
            late()
        pool.suspect("s0")
        await pool.remove("s0", "twice")


async def test_conversations_stay_on_their_server(new_server: New, wire: Any) -> None:
    a, b = await new_server("a"), await new_server("b")
    async with wire.pool_of(a, b) as pool:
        first = _route(pool, "talk")
        async with pool.lease(str(first), asyncio.get_running_loop().time() + 5):
            assert _route(pool, "talk") == first
            assert _route(pool, "other") != first
