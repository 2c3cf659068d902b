"""Rounds of the NCCL transport over a real store, with threads for processes and stand-ins for communicators."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from areal_like.api.weights import Manifest
from areal_like.errors import WeightUpdateError
from areal_like.weights.chunks import plan_chunks
from areal_like.weights.device_digest import device_digest
from areal_like.weights.losses import tell_lost
from areal_like.weights.nccl import Group, GroupBroken
from areal_like.weights.transports import nccl
from areal_like.weights.transports import seat as seat_module
from areal_like.weights.transports.meeting import Meeting
from areal_like.weights.transports.nccl import NcclWriter
from areal_like.weights.transports.nccl_reader import NcclReader
from areal_like.weights.transports.rounds import Member, RoundKeys, Terms, fault_of
from areal_like.weights.transports.seat import Membership, Seat
from tests.fakes.groups import FakeGroup, FakeGroups, FakeNet

CPU = torch.device("cpu")
STALL = 0.6
Break = Callable[[FakeGroup, int], None]


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (50, 33), "norm": (33,), "none": (0, 4), "head": (50, 33), "scale": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> FakeNet:
    for module in (nccl, seat_module):
        monkeypatch.setattr(module, "PULSE", 0.1)
    return FakeNet()


@pytest.fixture
def writer(net: FakeNet, monkeypatch: pytest.MonkeyPatch) -> Iterator[NcclWriter]:
    monkeypatch.setattr(nccl, "JOIN_WINDOW", 0.3)
    monkeypatch.setattr(nccl, "FIRST_WINDOW", 0.1)
    made = NcclWriter(host="127.0.0.1", bucket_bytes=4096, groups=FakeGroups(net, "gpu-0"), device=CPU, stall=STALL)
    yield made
    made.close()


class Server:
    """One receiving process, as a thread plays it."""

    def __init__(
        self, net: FakeNet, number: int, broken_by: Break = lambda group, place: None, *, of: str = "", workers: int = 1
    ) -> None:
        self.groups = FakeGroups(net, f"gpu-{number}", on_broadcast=broken_by)
        self.membership = Membership(self.groups, CPU, workers=workers)
        self.membership.server = of or self.membership.id
        self.pool = ThreadPoolExecutor(2)

    def take(self, manifest: Manifest, *, before: Callable[[], None] = lambda: None) -> Future[dict[str, str]]:
        """Digests of everything that arrives."""
        return self.pool.submit(self._take, manifest, before)

    def _take(self, manifest: Manifest, before: Callable[[], None]) -> dict[str, str]:
        seat = Seat(manifest, self.membership)
        seat.prepare()
        before()
        found: dict[str, str] = {}

        def take(group: Group) -> None:
            found.clear()
            for chunk in plan_chunks(sizes(manifest), seat.bucket_bytes):
                bucket = torch.empty(chunk.nbytes, dtype=torch.uint8)
                group.broadcast(bucket, src=0)
                for entry, offset in zip(manifest.tensors[chunk.first : chunk.last], chunk.offsets, strict=True):
                    part = bucket[offset : offset + entry.nbytes].view(getattr(torch, entry.dtype)).view(entry.shape)
                    found[entry.name] = device_digest(part)

        seat.receive(take)
        return found


def told(manifest: Manifest) -> dict[str, str]:
    return {entry.name: entry.digest for entry in manifest.tensors}


def written(writer: NcclWriter, version: int) -> Manifest:
    return writer.write(version, 0, iter(weights(version).items()))


def test_everyone_receives_what_was_written(writer: NcclWriter, net: FakeNet) -> None:
    manifest = written(writer, 1)
    assert told(manifest) == {name: device_digest(tensor) for name, tensor in weights(1).items()}
    servers = [Server(net, 1), Server(net, 2)]
    assert [task.result(20) for task in [server.take(manifest) for server in servers]] == [told(manifest)] * 2


def test_the_group_is_kept_while_its_members_stay(writer: NcclWriter, net: FakeNet) -> None:
    servers = [Server(net, 1), Server(net, 2)]
    for version in range(3):
        manifest = written(writer, version)
        for task in [server.take(manifest) for server in servers]:
            assert task.result(20) == told(manifest)
        if version == 0:  # the first may have met in two rounds: nobody knew how many would come
            first = len(servers[0].groups.joined) + len(servers[1].groups.joined)
    assert len(servers[0].groups.joined) + len(servers[1].groups.joined) - first <= 2


def test_nothing_is_sent_before_all_are_receiving(writer: NcclWriter, net: FakeNet) -> None:
    """A server that drains keeps the bytes back from all; nobody's GPU spins meanwhile."""
    manifest = written(writer, 1)
    drained = threading.Event()
    early, late = Server(net, 1), Server(net, 2)
    tasks = [early.take(manifest), late.take(manifest, before=lambda: drained.wait(10) and None)]
    until(lambda: bool(early.groups.joined) and bool(late.groups.joined))
    wires = [wire for wire in net.wires.values() if len(wire.members) == 3]
    assert wires
    until(lambda: all(count == 2 for count in wires[0].taken.values()))  # warmed up
    assert not any(task.done() for task in tasks)
    assert len(wires[0].sent) == 2
    drained.set()
    assert [task.result(20) for task in tasks] == [told(manifest)] * 2


def test_the_others_meet_again_without_one_that_is_lost_in_mid_broadcast(writer: NcclWriter, net: FakeNet) -> None:
    """It vanishes, as by SIGKILL: no word, no abort, no sign of life any more."""
    manifest = written(writer, 1)
    release = threading.Event()

    def vanish(group: FakeGroup, place: int) -> None:
        if place == 3:
            release.wait(30)
            raise GroupBroken("let the test's thread go")

    whole, lost = Server(net, 1), Server(net, 2, broken_by=vanish)
    kept, gone = whole.take(manifest), lost.take(manifest)
    assert kept.result(30) == told(manifest)
    release.set()
    with pytest.raises(WeightUpdateError):
        gone.result(30)
    following = written(writer, 2)
    assert whole.take(following).result(20) == told(following)


#: seconds without a sign of life that no test waits for
PATIENT = 60.0


@pytest.fixture
def patient(net: FakeNet, monkeypatch: pytest.MonkeyPatch) -> Iterator[NcclWriter]:
    """A writer that would miss a lost member only long after the test."""
    monkeypatch.setattr(nccl, "JOIN_WINDOW", PATIENT)
    monkeypatch.setattr(nccl, "FIRST_WINDOW", 0.3)
    made = NcclWriter(host="127.0.0.1", bucket_bytes=4096, groups=FakeGroups(net, "gpu-0"), device=CPU, stall=PATIENT)
    yield made
    made.close()


@pytest.mark.parametrize("place", [3, 2])
def test_one_that_its_control_knows_to_be_lost_is_not_waited_for(patient: NcclWriter, net: FakeNet, place: int) -> None:
    """It stands still in the middle of a broadcast, or at its beginning."""
    at, release = threading.Event(), threading.Event()

    def vanish(group: FakeGroup, taken: int) -> None:
        if taken == place:
            at.set()
            release.wait(30)
            raise GroupBroken("let the test's thread go")

    manifest = written(patient, 1)
    whole, lost = Server(net, 1), Server(net, 2, broken_by=vanish)
    tasks = [whole.take(manifest), lost.take(manifest)]
    assert at.wait(20)
    begun = time.monotonic()
    asyncio.run(tell_lost(manifest, lost.membership.server))
    assert tasks[0].result(30) == told(manifest)
    assert time.monotonic() - begun < PATIENT / 4
    release.set()
    following = written(patient, 2)
    assert whole.take(following).result(20) == told(following)
    tasks[1].exception(30)


def test_one_that_is_lost_before_it_receives_is_not_waited_for_once_its_control_says_so(
    patient: NcclWriter, net: FakeNet
) -> None:
    manifest = written(patient, 1)
    whole, idle = Server(net, 1), Server(net, 2)
    seat = Seat(manifest, idle.membership)
    waiting = threading.Event()
    task = whole.take(manifest, before=waiting.set)
    seat.prepare()
    assert waiting.wait(20)
    asyncio.run(tell_lost(manifest, idle.membership.server))
    assert task.result(30) == told(manifest)
    seat.leave()


def test_one_that_was_lost_may_come_back(patient: NcclWriter, net: FakeNet) -> None:
    manifest = written(patient, 1)
    server = Server(net, 1)
    asyncio.run(tell_lost(manifest, server.membership.server))
    asyncio.run(tell_lost(manifest, "one that was never there"))
    assert server.take(manifest).result(20) == told(manifest)
    asyncio.run(tell_lost(manifest, server.membership.server))
    following = written(patient, 2)
    assert server.take(following).result(20) == told(following)


def test_only_who_knows_the_versions_key_is_heard(patient: NcclWriter, net: FakeNet) -> None:
    manifest = written(patient, 1)
    key = Meeting.parse(manifest.location).key
    forged = manifest.model_copy(update={"location": manifest.location.replace(key, "a guess")})
    asyncio.run(tell_lost(forged, "s0"))
    assert not patient._lost
    asyncio.run(tell_lost(manifest, "s0"))
    assert list(patient._lost) == ["s0"]


def test_one_that_is_lost_before_it_receives_holds_up_nobody_for_long(writer: NcclWriter, net: FakeNet) -> None:
    manifest = written(writer, 1)
    whole, lost = Server(net, 1), Server(net, 2)
    seat = Seat(manifest, lost.membership)
    kept = whole.take(manifest)
    seat.prepare()
    seat.leave()  # its thread ends, and with it its signs of life
    assert kept.result(30) == told(manifest)


def test_the_workers_of_a_server_take_part_together(writer: NcclWriter, net: FakeNet) -> None:
    """None of them commits before all are seated: half a server in a round would wait for ever."""
    for version in range(2):
        manifest = written(writer, version)
        if version == 0:
            servers = [Server(net, number, of=of, workers=2) for number, of in enumerate("abab", start=1)]
        barriers = {of: threading.Barrier(2) for of in "ab"}
        tasks = []
        for server in servers:
            barrier = barriers[server.membership.server]
            tasks.append(server.take(manifest, before=lambda barrier=barrier: barrier.wait(20) and None))
            time.sleep(0.15)  # longer than the window in which newcomers are expected
        assert [task.result(30) for task in tasks] == [told(manifest)] * 4


def test_one_that_never_receives_keeps_the_others_paused_no_longer_than_told(writer: NcclWriter, net: FakeNet) -> None:
    """It lives, and gives signs of life; but its control was lost, and nobody tells it to commit."""
    manifest = written(writer, 1)
    ready, idle = Server(net, 1), Server(net, 2)
    seat = Seat(manifest, idle.membership)
    task = ready.take(manifest)
    seat.prepare()
    assert task.result(20) == told(manifest)
    following = written(writer, 2)
    tasks = [server.take(following) for server in (ready, idle)]
    assert [task.result(30) for task in tasks] == [told(following)] * 2


def test_a_trainer_that_stops_in_mid_broadcast_ends_the_receiving(
    net: FakeNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "JOIN_WINDOW", 0.1)
    stopped = threading.Event()

    def stop(group: FakeGroup, place: int) -> None:
        if place == 3:
            stopped.wait(30)

    groups = FakeGroups(net, "gpu-0", on_broadcast=stop)
    writer = NcclWriter(host="127.0.0.1", bucket_bytes=4096, groups=groups, device=CPU, stall=STALL)
    server = Server(net, 1)
    begun = time.monotonic()
    task = server.take(written(writer, 1))
    until(lambda: server.groups.joined != [] and server.groups.joined[0].broken, seconds=10 * STALL)
    assert time.monotonic() - begun < 8 * STALL
    stopped.set()
    assert task.result(30)  # it came to itself: the next round went through
    writer.close()


def test_a_version_that_is_over_is_not_waited_for(writer: NcclWriter, net: FakeNet) -> None:
    manifest = written(writer, 1)
    server = Server(net, 1)
    seat = Seat(manifest, server.membership)
    seat.prepare()
    written(writer, 2)
    with pytest.raises(WeightUpdateError, match="no longer offered"):
        seat.receive(lambda group: None)


def test_a_new_version_waits_for_the_broadcast_of_the_one_before(writer: NcclWriter, net: FakeNet) -> None:
    manifest = written(writer, 1)
    server = Server(net, 1)
    assert server.take(manifest).result(20) == told(manifest)
    again = written(writer, 2)
    assert server.take(again).result(20) == told(again)
    assert len(server.groups.joined) == 1


def test_a_trainer_that_is_gone_is_told(writer: NcclWriter, net: FakeNet) -> None:
    manifest = written(writer, 1)
    gone = manifest.model_copy(update={"location": manifest.location.replace(f":{writer._port}/", ":1/")})
    with pytest.raises(WeightUpdateError, match="the trainer does not answer"):
        Seat(gone, Server(net, 1).membership).prepare()


@pytest.mark.parametrize(
    ("gpu", "version", "said"),
    [("gpu-0", "22800", "weights.transport=ipc"), ("gpu-1", "22700", "the trainer has NCCL 22800")],
)
def test_members_that_can_form_no_group_are_told_why(
    writer: NcclWriter, net: FakeNet, gpu: str, version: str, said: str
) -> None:
    manifest = written(writer, 1)
    with pytest.raises(WeightUpdateError, match=said):
        Seat(manifest, Membership(FakeGroups(net, gpu, version=version), CPU)).prepare()


def test_a_reader_that_stages_receives_while_it_is_opened(writer: NcclWriter, net: FakeNet) -> None:
    manifest = written(writer, 1)
    with NcclReader(manifest, Server(net, 1).membership) as reader:
        for name, tensor in weights(1).items():
            entry = next(entry for entry in manifest.tensors if entry.name == name)
            target = torch.empty_like(tensor)
            reader.read_into(entry, target)
            assert torch.equal(target, tensor)


def test_terms_and_members_travel_as_json() -> None:
    terms = Terms(group="g", unique_id=bytes(range(128)), ranks={"a": 1, "b": 2}, fault="")
    assert Terms.from_json(terms.to_json()) == terms
    assert terms.size == 3
    member = Member(id="a", server="s", workers=2, held="", library="22800", gpu="u", host="h")
    assert Member.from_json(member.to_json()) == member
    assert fault_of([member], replace(member, id="t", gpu="v")) == ""
    assert RoundKeys(key="k", number=2).done(1) == "k/2/done/1"


def until(found: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def sizes(manifest: Manifest) -> Sequence[int]:
    return [entry.nbytes for entry in manifest.tensors]
