from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

import pytest

from areal_like.api.weights import CommitReceipt, InterruptMode, Manifest, TensorEntry, TransportKind
from areal_like.api.wire import StageAnswer
from areal_like.errors import RemoteError, ServerUnavailable, StaleCommand, WeightUpdateError
from areal_like.weights.channel import PublicationTimes, ServerCalls, WeightChannel
from areal_like.weights.manifest import make_manifest


def _manifest(version: int, incarnation: int = 0) -> Manifest:
    entry = TensorEntry(name="a", dtype="float32", shape=(2,), nbytes=8, digest=f"{version:032d}")
    return make_manifest(version, incarnation, TransportKind.SHM, "areal-like-x+0", [entry])


class Exporter:
    def __init__(self) -> None:
        self.exported: list[int] = []

    async def export_weights(self, version: int, incarnation: int) -> Manifest:
        self.exported.append(version)
        return _manifest(version, incarnation)


async def _nothing() -> None:
    return


class Server:
    """Follows the protocol; ``at_stage`` and ``at_commit`` may fail or hang, ``change`` falsifies the receipt."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.at_stage: Callable[[], Awaitable[None]] = _nothing
        self.at_commit: Callable[[], Awaitable[None]] = _nothing
        self.change: dict[str, object] = {}
        self.staged: Manifest | None = None
        self.log: list[str] = []

    async def stage(self, manifest: Manifest, *, timeout: float) -> StageAnswer:
        self.log.append(f"stage {manifest.version}")
        await self.at_stage()
        self.staged = manifest
        return StageAnswer(version=manifest.version, bytes=manifest.total_bytes, seconds=0.5)

    async def commit(self, *, version: int, incarnation: int, mode: InterruptMode, timeout: float) -> CommitReceipt:
        self.log.append(f"commit {version} {mode}")
        await self.at_commit()
        assert self.staged is not None and self.staged.version == version
        receipt = CommitReceipt(
            server=self.name,
            incarnation=incarnation,
            version=version,
            digest=self.staged.digest,
            bytes=8,
            seconds_staged=0.5,
            seconds_paused=0.25,
            interrupted_requests=3,
        )
        return receipt.model_copy(update=self.change)


class Rotation:
    def __init__(self, *servers: Server) -> None:
        self.servers = {s.name: s for s in servers}
        self.acknowledged: dict[str, int] = {}
        self.ejected: dict[str, str] = {}
        self.recovered: asyncio.Queue[str] = asyncio.Queue()

    def publication_targets(self) -> Mapping[str, Server]:
        return {name: s for name, s in self.servers.items() if name not in self.ejected}

    def weight_server(self, server: str) -> Server:
        if server not in self.servers:
            raise ServerUnavailable(f"no server named {server!r}")
        return self.servers[server]

    def acknowledge(self, receipt: CommitReceipt) -> None:
        self.ejected.pop(receipt.server, None)
        self.acknowledged[receipt.server] = receipt.version

    def eject(self, server: str, reason: str) -> None:
        self.acknowledged.pop(server, None)
        self.ejected[server] = reason

    async def next_recovered(self) -> str:
        return await self.recovered.get()


@pytest.fixture
def servers() -> tuple[Server, Server]:
    return Server("a"), Server("b")


@pytest.fixture
def rotation(servers: tuple[Server, Server]) -> Rotation:
    return Rotation(*servers)


@pytest.fixture
def channel(rotation: Rotation) -> WeightChannel:
    return WeightChannel(Exporter(), rotation, timeout=0.5)


async def _fail(error: Exception) -> None:
    raise error


async def _hang() -> None:
    await asyncio.Event().wait()


async def test_a_version_is_staged_committed_and_acknowledged_everywhere(
    channel: WeightChannel, rotation: Rotation, servers: tuple[Server, Server]
) -> None:
    receipts = await channel.publish(0)
    assert [r.server for r in receipts] == ["a", "b"]
    assert rotation.acknowledged == {"a": 0, "b": 0}
    assert all(s.log == ["stage 0", "commit 0 keep"] for s in servers)
    assert channel.manifest == _manifest(0)


async def test_statistics_add_up(channel: WeightChannel) -> None:
    await channel.publish(0)
    await channel.publish(1)
    now = channel.statistics()
    assert (now.version, now.versions_published, now.bytes_total, now.interrupted_requests) == (1, 2, 32, 12)
    assert (now.seconds_staged, now.seconds_paused) == (2.0, 1.0)
    assert (now.failed_publications, now.ejections, now.readmissions) == (0, 0, 0)
    assert now.seconds_published >= now.seconds_exported >= 0.0


async def test_a_publication_tells_the_seconds_of_its_calls(
    rotation: Rotation, servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def takes(seconds: float) -> Callable[[], Awaitable[None]]:
        async def work() -> None:
            nonlocal now
            now += seconds

        return work

    class Slow(Exporter):
        async def export_weights(self, version: int, incarnation: int) -> Manifest:
            await takes(16.0)()
            return await super().export_weights(version, incarnation)

    channel = WeightChannel(Slow(), rotation, timeout=500.0)
    servers[0].at_stage, servers[0].at_commit = takes(1.0), takes(2.0)
    servers[1].at_stage, servers[1].at_commit = takes(4.0), takes(8.0)
    assert channel.times is None
    await channel.publish(0)
    both = {"a": ServerCalls(stage=1.0, commit=2.0), "b": ServerCalls(stage=4.0, commit=8.0)}
    assert channel.times == PublicationTimes(export=16.0, servers=both)
    servers[1].change = {"digest": "0" * 32}  # it took its time, and serves something else
    await channel.publish(1)
    assert channel.times == PublicationTimes(export=16.0, servers={"a": both["a"]})
    servers[0].at_commit = lambda: _fail(WeightUpdateError("no"))
    with pytest.raises(WeightUpdateError):
        await channel.publish(2)
    assert channel.times.servers == {"a": both["a"]}  # the last one that reached anybody


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"digest": "0" * 32}, "half-applied"),
        ({"version": 4}, "for version 4"),
        ({"incarnation": 9}, "of incarnation 9"),
        ({"server": "b"}, "signed by 'b'"),
    ],
)
async def test_a_false_receipt_ejects_its_server(
    channel: WeightChannel,
    rotation: Rotation,
    servers: tuple[Server, Server],
    change: dict[str, object],
    complaint: str,
) -> None:
    servers[0].change = change
    receipts = await channel.publish(5)
    assert [r.server for r in receipts] == ["b"]
    assert complaint in rotation.ejected["a"]
    assert rotation.acknowledged == {"b": 5}


@pytest.mark.parametrize("step", ["at_stage", "at_commit"])
async def test_a_failing_server_is_out_before_publish_returns(
    channel: WeightChannel, rotation: Rotation, servers: tuple[Server, Server], step: str
) -> None:
    setattr(servers[0], step, lambda: _fail(WeightUpdateError("tensor 'a' is missing")))
    await channel.publish(1)
    assert "failed: WeightUpdateError: tensor 'a' is missing" in rotation.ejected["a"]
    assert step.removeprefix("at_") in rotation.ejected["a"]
    assert channel.statistics().ejections == 1


@pytest.mark.parametrize("step", ["at_stage", "at_commit"])
async def test_a_stalled_server_is_out_at_the_deadline(
    channel: WeightChannel, rotation: Rotation, servers: tuple[Server, Server], step: str
) -> None:
    setattr(servers[0], step, _hang)
    async with asyncio.timeout(5):
        await channel.publish(1)
    assert rotation.ejected["a"] == f"{step.removeprefix('at_')} of version 1 did not end within 0.5 s"
    assert rotation.acknowledged == {"b": 1}


async def test_no_server_left_is_an_error_with_every_reason(
    channel: WeightChannel, rotation: Rotation, servers: tuple[Server, Server]
) -> None:
    servers[0].at_stage = _hang
    servers[1].change = {"digest": "0" * 32}
    with pytest.raises(WeightUpdateError, match=r"a: stage of version 1 did not end.*; b: its live weights"):
        await channel.publish(1)
    with pytest.raises(WeightUpdateError, match="none was in rotation"):
        await channel.publish(1)
    assert channel.statistics().failed_publications == 2
    assert channel.statistics().versions_published == 0


async def test_a_failed_publication_may_be_repeated(
    channel: WeightChannel, rotation: Rotation, servers: tuple[Server, Server]
) -> None:
    for server in servers:
        server.at_commit = lambda: _fail(ServerUnavailable("refused"))
    with pytest.raises(WeightUpdateError):
        await channel.publish(1)
    for server in servers:
        server.at_commit = _nothing
    rotation.ejected.clear()
    assert len(await channel.publish(1)) == 2


async def test_an_older_version_is_refused(channel: WeightChannel) -> None:
    await channel.publish(2)
    with pytest.raises(StaleCommand, match="version 2 is already out"):
        await channel.publish(1)


async def test_publications_are_serialised(rotation: Rotation, servers: tuple[Server, Server]) -> None:
    channel = WeightChannel(Exporter(), rotation, timeout=5.0)
    running: list[str] = []
    overlaps: list[str] = []

    async def step() -> None:
        overlaps.extend(running)
        running.append("a")
        await asyncio.sleep(0)
        running.remove("a")

    servers[0].at_stage = servers[0].at_commit = step
    await asyncio.gather(*(channel.publish(v) for v in range(5)))
    assert overlaps == []
    assert servers[0].log == [line for v in range(5) for line in (f"stage {v}", f"commit {v} keep")]


async def test_an_exporter_that_fails_touches_no_server(rotation: Rotation, servers: tuple[Server, Server]) -> None:
    class Broken(Exporter):
        async def export_weights(self, version: int, incarnation: int) -> Manifest:
            raise RemoteError("the rank raised")

    channel = WeightChannel(Broken(), rotation, timeout=1.0)
    with pytest.raises(RemoteError):
        await channel.publish(0)
    assert rotation.ejected == {}
    assert servers[0].log == []
    assert channel.statistics().failed_publications == 1


async def test_an_exporter_that_hangs_ends_at_the_deadline(rotation: Rotation) -> None:
    class Hanging(Exporter):
        async def export_weights(self, version: int, incarnation: int) -> Manifest:
            await _hang()
            raise AssertionError

    with pytest.raises(WeightUpdateError, match=r"export of version 0 took more than 0\.5 s"):
        await WeightChannel(Hanging(), rotation, timeout=0.5).publish(0)
    assert rotation.ejected == {}


async def test_an_exporter_that_answers_with_another_version_is_refused(rotation: Rotation) -> None:
    class Confused(Exporter):
        async def export_weights(self, version: int, incarnation: int) -> Manifest:
            return _manifest(version - 1, incarnation)

    with pytest.raises(WeightUpdateError, match=r"asked to export version 3 .* exported 2"):
        await WeightChannel(Confused(), rotation).publish(3)


async def test_a_publication_that_is_cancelled_leaves_no_server_at_an_unknown_version(
    rotation: Rotation, servers: tuple[Server, Server]
) -> None:
    channel = WeightChannel(Exporter(), rotation, timeout=60.0)
    reached = asyncio.Event()

    async def stall() -> None:
        reached.set()
        await _hang()

    servers[0].at_commit = stall
    task = asyncio.create_task(channel.publish(1))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "broken off" in rotation.ejected["a"]
    assert rotation.acknowledged == {"b": 1}


async def test_the_mode_of_interruption_and_the_incarnation_are_passed_on(
    rotation: Rotation, servers: tuple[Server, Server]
) -> None:
    channel = WeightChannel(Exporter(), rotation, incarnation=3, interrupt=InterruptMode.DRAIN)
    receipts = await channel.publish(0)
    assert servers[0].log[-1] == "commit 0 drain"
    assert {r.incarnation for r in receipts} == {3}


async def test_readmission_takes_the_current_version(
    channel: WeightChannel, rotation: Rotation, servers: tuple[Server, Server]
) -> None:
    with pytest.raises(WeightUpdateError, match="no version was published yet"):
        await channel.readmit("a")
    servers[0].at_stage = lambda: _fail(ServerUnavailable("down"))
    await channel.publish(0)
    await channel.publish(1)
    assert "a" in rotation.ejected
    servers[0].at_stage = _nothing
    receipt = await channel.readmit("a")
    assert (receipt.version, rotation.acknowledged) == (1, {"a": 1, "b": 1})
    assert channel.statistics().readmissions == 1


async def test_readmission_that_fails_keeps_the_server_out_with_the_new_reason(
    channel: WeightChannel, rotation: Rotation, servers: tuple[Server, Server]
) -> None:
    await channel.publish(0)
    rotation.eject("a", "old reason")
    servers[0].change = {"digest": "0" * 32}
    with pytest.raises(WeightUpdateError, match="a was not readmitted"):
        await channel.readmit("a")
    assert "half-applied" in rotation.ejected["a"]
    with pytest.raises(ServerUnavailable, match="'nobody'"):
        await channel.readmit("nobody")


async def test_readmission_waits_for_a_publication_under_way(
    rotation: Rotation, servers: tuple[Server, Server]
) -> None:
    channel = WeightChannel(Exporter(), rotation, timeout=10.0)
    await channel.publish(0)
    rotation.eject("a", "away")
    reached, gate = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        reached.set()
        await gate.wait()

    servers[1].at_stage = wait
    publishing = asyncio.create_task(channel.publish(1))
    readmitting = asyncio.create_task(channel.readmit("a"))
    await reached.wait()
    assert servers[0].log == ["stage 0", "commit 0 keep"]
    gate.set()
    await publishing
    assert (await readmitting).version == 1


async def test_recovered_servers_are_readmitted_and_failures_do_not_end_the_loop(
    channel: WeightChannel, rotation: Rotation, servers: tuple[Server, Server]
) -> None:
    await channel.publish(0)
    rotation.eject("a", "away")
    rotation.eject("b", "away")
    servers[0].change = {"digest": "0" * 32}
    loop = asyncio.create_task(channel.readmit_recovered())
    for name in ("a", "b"):
        rotation.recovered.put_nowait(name)
    b_committed = asyncio.Event()

    async def committed() -> None:
        b_committed.set()

    servers[1].at_commit = committed
    async with asyncio.timeout(5):
        await b_committed.wait()
        await channel.publish(0)  # queues behind the readmission for the lock
    loop.cancel()
    assert "a" in rotation.ejected


async def test_who_failed_is_told_to_the_trainer_while_the_others_are_still_at_it(
    rotation: Rotation, servers: tuple[Server, Server]
) -> None:
    """Between GPUs the others wait for it: whatever it failed at, and however."""
    told: list[tuple[int, str]] = []
    heard = asyncio.Event()

    async def tell(manifest: Manifest, server: str) -> None:
        told.append((manifest.version, server))
        heard.set()

    async def waits() -> None:
        await heard.wait()

    lost, whole = servers
    channel = WeightChannel(Exporter(), rotation, timeout=0.5, tell_lost=tell)
    ways: list[tuple[str, Callable[[], Awaitable[None]]]] = [
        ("at_commit", lambda: _fail(ServerUnavailable("it is gone"))),
        ("at_stage", lambda: _fail(WeightUpdateError("it cannot"))),
        ("at_commit", _hang),
    ]
    for version, (step, way) in enumerate(ways):
        heard.clear()
        rotation.ejected.clear()
        lost.at_stage = lost.at_commit = _nothing
        setattr(lost, step, way)
        whole.at_commit = waits if way is not _hang else _nothing
        receipts = await channel.publish(version)
        assert [receipt.server for receipt in receipts] == ["b"]
        assert told[version:] == [(version, "a")]
    lost.at_commit = _nothing
    await channel.publish(3)
    assert len(told) == 3
