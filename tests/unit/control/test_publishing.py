"""What the channel publishes is counted, and what servers acknowledge reaches the rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
from control_cases import receipt_of

from areal_like.api.weights import CommitReceipt
from areal_like.control.journal import RunJournal
from areal_like.control.publishing import WeightPublisher
from areal_like.errors import ReachedNoServer, ServersTaken, WeightUpdateError
from areal_like.weights.channel import PublicationTimes


class Pool:
    """A pool whose acknowledged version the test moves."""

    def __init__(self) -> None:
        self.lowest_version = -1
        self.taken = self.looked = self.returns = False
        self._event = asyncio.Event()

    def move(self, version: int) -> None:
        self.lowest_version = version
        self._event.set()
        self._event = asyncio.Event()

    async def changed(self) -> None:
        await self._event.wait()

    async def look_at_all(self) -> None:
        self.looked = True

    def check_taken(self) -> None:
        if self.taken and self.looked:
            raise ServersTaken("by another run")

    async def regained(self, version: int, seconds: float) -> bool:
        assert seconds == 60
        self.lowest_version = version if self.returns else self.lowest_version
        return self.returns

    def whereabouts(self) -> str:
        return "s0 is ejected"


class Listeners:
    """Journal, rollouts and channel at once."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.told: list[Any] = []
        self.fails: type[Exception] | None = None
        self.times: PublicationTimes | None = None

    async def publish(self, version: int) -> tuple[CommitReceipt, ...]:
        if self.fails:
            raise self.fails("no server")
        self.pool.lowest_version = version
        self.times = PublicationTimes(export=float(version), servers={})
        return (receipt_of(version),)

    @contextmanager
    def publication(self, version: int) -> Iterator[None]:
        self.told.append(f"begin {version}")
        yield

    def published(self, receipts: tuple[CommitReceipt, ...], times: PublicationTimes | None = None) -> None:
        self.told.append([r.version for r in receipts])
        self.told.append(None if times is None else f"exported in {times.export:g} s")

    def acknowledged(self, version: int) -> None:
        self.told.append(version)


@pytest.fixture
def listeners() -> Listeners:
    return Listeners(Pool())


def _publisher(listeners: Listeners, patience: float = 0.0) -> WeightPublisher:
    journal = cast(RunJournal, listeners)
    return WeightPublisher(
        channel=listeners, pool=listeners.pool, rollouts=listeners, journal=journal, patience=patience
    )


async def test_a_publication_is_noted_and_then_acknowledged(listeners: Listeners) -> None:
    await _publisher(listeners).publish(3)
    assert listeners.told == ["begin 3", [3], "exported in 3 s", 3]


@pytest.mark.parametrize(("fails", "patience"), [(ReachedNoServer, 0.0), (WeightUpdateError, 60.0)])
async def test_a_failed_publication_tells_nobody_of_the_version(
    listeners: Listeners, fails: type[Exception], patience: float
) -> None:
    """Nobody waits for servers of ours, nor for any where there is no version to give them."""
    listeners.fails, listeners.pool.returns = fails, True
    with pytest.raises(fails, match=r"no server$"):
        await _publisher(listeners, patience).publish(3)
    assert listeners.told == ["begin 3"]


async def test_a_publication_waits_for_the_only_server_to_be_started_again(listeners: Listeners) -> None:
    listeners.fails, listeners.pool.returns = ReachedNoServer, True
    await _publisher(listeners, 60).publish(3)
    assert listeners.told == ["begin 3", [], None, 3]


async def test_a_server_that_does_not_come_back_is_told_with_where_it_is(listeners: Listeners) -> None:
    listeners.fails = ReachedNoServer
    with pytest.raises(ReachedNoServer, match=r"no server; none came back \(s0 is ejected\)"):
        await _publisher(listeners, 60).publish(3)


async def test_a_publication_that_failed_since_another_run_has_the_servers_says_so(listeners: Listeners) -> None:
    listeners.fails, listeners.pool.taken = ReachedNoServer, True
    with pytest.raises(ServersTaken, match="by another run"):
        await _publisher(listeners, 60).publish(3)


async def test_servers_that_another_run_took_end_this_one_without_a_publication(listeners: Listeners) -> None:
    following = asyncio.create_task(_publisher(listeners).follow())
    await asyncio.sleep(0)
    listeners.pool.taken = listeners.pool.looked = True
    listeners.pool.move(0)
    with pytest.raises(ServersTaken):
        await following


async def test_changes_between_publications_reach_the_rollouts(listeners: Listeners) -> None:
    following = asyncio.create_task(_publisher(listeners).follow())
    await asyncio.sleep(0)
    assert listeners.told == []  # nothing was acknowledged yet
    for version in (0, 2):  # the server that was behind left the rotation
        listeners.pool.move(version)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    following.cancel()
    assert listeners.told == [0, 2]
