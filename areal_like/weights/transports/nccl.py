"""``collective`` over NCCL, the trainer's end: a packed copy on the trainer's GPU, broadcast to GPUs.

    write:  pack into device buckets, digest there --> offer            (the trainer goes on with its next step)
    thread: round: who joined --> group, kept while its members stay the same --> all receiving? --> go --> broadcast

The group is formed and warmed up while servers still generate. Buckets leave only once every member is receiving, so
no GPU spins while a server drains; but nobody is kept paused for long by others: who is late comes in a later round. A
member that is lost breaks the round: the communicator is aborted, the trainer
lives on, and the others meet again in the next round (``weights.transports.rounds``). That a member is lost shows after
``stall`` seconds, or at once where the server's control says so (``weights.losses``).
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from areal_like.api.weights import Manifest, TransportKind
from areal_like.errors import WeightUpdateError
from areal_like.weights.device_packer import DevicePacker, Packed
from areal_like.weights.manifest import make_manifest
from areal_like.weights.nccl import Group, GroupBroken, Groups
from areal_like.weights.transports.door import Door, Shelf, packed_pieces
from areal_like.weights.transports.meeting import DEFAULT_STALL, Meeting, open_store
from areal_like.weights.transports.rounds import (
    PULSE,
    QUICK_LOOK,
    SLOW_LOOK,
    Member,
    RoundKeys,
    Terms,
    fault_of,
    over_key,
    own_host,
    whole_servers,
)

_LOG = logging.getLogger(__name__)

#: seconds after the first member of a round until it closes without those that were expected...
JOIN_WINDOW = 3.0
#: ...and without a newcomer until it closes, where nobody knows how many to expect
FIRST_WINDOW = 1.0
#: seconds between two looks while nobody has joined
_IDLE_LOOK = 0.02
#: seconds that members get to say that they are done once the next version is on its way
_GRACE = 1.0
#: seconds until the thread has ended, unless something is on its way
_CLOSING = 2.0
#: bytes of the broadcasts that make a new group's connections: of a small and of a large message's protocol
WARM_UP_BYTES = (4096, 32 * 2**20)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    key: str
    packed: Packed


class _Over(Exception):
    """The version is no longer offered."""


class NcclWriter:
    """The trainer's end (rank 0). Keeps one packed copy of the model on its GPU."""

    def __init__(
        self, *, host: str, bucket_bytes: int, groups: Groups, device: torch.device, stall: float = DEFAULT_STALL
    ) -> None:
        """``host``: address of this machine that the servers can reach.

        ``stall``: seconds without progress, or without a sign of life, after which a member counts as lost.
        """
        self._host, self._groups, self._device, self._stall = host, groups, device, stall
        self._packer = DevicePacker(device, bucket_bytes)
        self._store, self._port = open_store(host)
        self._door = Door(host=host, store=self._store, backend="nccl", device=device, on_lost=self.lose)
        self._ranks: Mapping[str, int] = {}
        self._group: Group | None = None
        self._group_name = ""
        self._changed = threading.Condition()
        self._reading = threading.Lock()
        self._offer: _Offer | None = None
        self._closed = False
        self._expected: int | None = None
        #: by server, when its control said that it is lost; by member of a round, when it was seen
        self._lost: dict[str, float] = {}
        self._seen: dict[str, float] = {}
        self._sending: tuple[frozenset[str], Group] | None = None
        self._thread = threading.Thread(target=self._serve, name="weights-sender", daemon=True)
        self._thread.start()

    def write(self, version: int, incarnation: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """See :meth:`WeightWriter.write`. The version before is gone."""
        self._withdraw()
        packed = self._packer.pack(tensors)
        offer = _Offer(key=f"{secrets.token_hex(16)}.v{version}.i{incarnation}", packed=packed)
        with self._changed:
            self._offer = offer
            self._changed.notify()
        self._door.show(Shelf(offer.key, packed.buckets, packed_pieces(packed.entries, packed.chunks)))
        meeting = Meeting(
            host=self._host, port=self._port, key=offer.key, bucket_bytes=self._packer.bucket_bytes, backend="nccl",
            door=self._door.port, stall=self._stall,
        )  # fmt: skip
        return make_manifest(version, incarnation, TransportKind.COLLECTIVE, meeting.location(), packed.entries)

    def lose(self, server: str) -> None:
        """``server`` was lost: nobody waits for it any more. It may join again. May be called from any thread."""
        self._lost[server] = time.monotonic()
        sending = self._sending
        if sending is not None and server in sending[0]:
            sending[1].abort()

    def close(self) -> None:
        """Stop offering, and leave the group. The thread is a daemon, and ends for itself."""
        self._door.close()
        with self._changed:
            self._closed = True
            offer = self._offer
            self._changed.notify()
        if offer is not None:
            self._store.set(over_key(offer.key), "1")
        self._thread.join(timeout=_CLOSING)
        if self._group is not None:
            self._group.abort()

    def _withdraw(self) -> None:
        """Nobody reads the buckets any more. Raises WeightUpdateError where that cannot be had."""
        with self._changed:
            offer, self._offer = self._offer, None
        if offer is not None:
            self._store.set(over_key(offer.key), "1")
        if not self._reading.acquire(timeout=2 * self._stall):
            raise WeightUpdateError(f"the version before is still being sent, {2 * self._stall:g} s after it was over")
        self._reading.release()

    # -- the thread --

    def _serve(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._offer is not None)
                if self._closed:
                    return
                offer = self._offer
            if offer is not None:
                self._serve_offer(offer)

    def _serve_offer(self, offer: _Offer) -> None:
        """Rounds of one version, until there is another."""
        served, number, gone = 0, 0, 0
        try:
            while True:
                keys = RoundKeys(key=offer.key, number=number)
                wanted = None if self._expected is None else max(self._expected - served - gone, 1)
                members = self._close_round(offer, keys, wanted)
                if self._run_round(offer, keys, members):
                    served += len(members)
                else:
                    gone += len(self._lost_of(members))
                number += 1
        except _Over:
            self._expected = served or self._expected

    def _run_round(self, offer: _Offer, keys: RoundKeys, members: Sequence[Member]) -> bool:
        """False where it broke. The thread must live on, whatever went wrong: the next round may do better."""
        try:
            self._round(offer, keys, members)
        except _Over:
            raise
        except Exception as error:  # supervision boundary of the thread
            _LOG.warning("a broadcast of weights broke, its members meet again: %s", error)
            self._drop_group()
            self._store.set(keys.broken, str(error) or type(error).__name__)
            return False
        return True

    def _close_round(self, offer: _Offer, keys: RoundKeys, wanted: int | None) -> Sequence[Member]:
        """Wait for a round's members; of each server all workers, or none. Raises _Over."""
        members: dict[int, Member] = {}
        self._seen = {}
        first = latest = 0.0
        while True:
            self._check_offered(offer)
            joined: int = self._store.add(keys.joined, 0)
            now = time.monotonic()
            for place in range(1, joined + 1):
                if place not in members and self._store.check([keys.member(place)]):
                    members[place] = Member.from_json(self._store.get(keys.member(place)))
                    first, latest = first or now, now
                    self._seen[members[place].id] = now
            lost = self._lost_of(list(members.values()))
            whole = whole_servers([member for member in members.values() if member not in lost])
            everyone = wanted is not None and len(whole) + len(lost) == joined >= wanted
            waited = now - first > JOIN_WINDOW if wanted is not None else now - latest > FIRST_WINDOW
            if whole and (everyone or waited):
                return whole
            time.sleep(SLOW_LOOK if joined else _IDLE_LOOK)

    def _round(self, offer: _Offer, keys: RoundKeys, members: Sequence[Member]) -> None:
        """One broadcast. Raises GroupBroken, or _Over where it did not come to that."""
        group = self._meet(keys, members)
        if group is None:
            return
        pulses = _Pulses(self._store.add, keys, len(members), self._stall)
        ranks = range(1, 1 + len(members))

        receiving = [keys.receiving(rank) for rank in ranks]
        paused: list[float] = []

        def still() -> None:
            self._check_offered(offer)
            self._check_lost(members)
            pulses.check()
            if not paused and any(self._store.check([key]) for key in receiving):
                paused.append(time.monotonic())
            if paused and time.monotonic() - paused[0] > self._stall:
                raise GroupBroken(f"some are paused and receiving, and others were not within {self._stall:g} s")

        self._until(keys, receiving, still)
        with self._reading:
            self._check_offered(offer)
            self._store.set(keys.go, "1")
            self._send(offer, group, members)
        self._until(keys, [keys.done(rank) for rank in ranks], self._patience(offer, keys, members, pulses))

    def _send(self, offer: _Offer, group: Group, members: Sequence[Member]) -> None:
        """Until every member has the bytes. Raises GroupBroken."""
        self._sending = (frozenset(member.server for member in members), group)
        try:
            self._check_lost(members)
            with side_stream(self._device):
                for bucket in offer.packed.buckets:
                    group.broadcast(bucket, src=0)
            group.wait(self._stall)
        finally:
            self._sending = None

    def _patience(
        self, offer: _Offer, keys: RoundKeys, members: Sequence[Member], pulses: _Pulses
    ) -> Callable[[], None]:
        """For members that have everything, and must only say so: a moment longer than the version is offered."""
        left = [_GRACE / QUICK_LOOK]

        def still() -> None:
            lost = self._lost_of(members)
            self._check_lost([m for m in lost if not self._store.check([keys.done(self._ranks[m.id])])])
            pulses.check()
            if self._closed or self._offer is not offer:
                left[0] -= 1
                if left[0] < 0:
                    raise GroupBroken("a member did not say that it had everything before the version was over")

        return still

    def _until(self, keys: RoundKeys, wanted: Sequence[str], still: Callable[[], None]) -> None:
        """Until all keys are there. Raises GroupBroken where a member says that the round broke."""
        while not self._store.check(list(wanted)):
            if self._store.check([keys.broken]):
                raise GroupBroken(f"a member left: {self._store.get(keys.broken).decode()}")
            still()
            time.sleep(QUICK_LOOK)

    def _meet(self, keys: RoundKeys, members: Sequence[Member]) -> Group | None:
        """The group of these members: the one from before, or a new one; None where they can form none."""
        group = self._group
        stayed = {m.id for m in members} == self._ranks.keys() and all(m.held == self._group_name for m in members)
        if group is not None and not group.broken and stayed:
            self._tell(keys, Terms(group=self._group_name, unique_id=b"", ranks=self._ranks))
            return group
        self._drop_group()
        fault = fault_of(members, self._ourselves())
        ranks = {} if fault else {member.id: rank for rank, member in enumerate(members, start=1)}
        name = secrets.token_hex(8)
        terms = Terms(group=name, unique_id=b"" if fault else self._groups.unique_id(), ranks=ranks, fault=fault)
        self._tell(keys, terms)
        if fault:
            return None
        group = self._groups.join(terms.unique_id, rank=0, size=terms.size)
        self._group, self._group_name, self._ranks = group, name, ranks
        warm_up(group, self._device, self._stall)
        return group

    def _tell(self, keys: RoundKeys, terms: Terms) -> None:
        self._store.set(keys.terms, terms.to_json())

    def _ourselves(self) -> Member:
        return Member(
            id="trainer", server="trainer", workers=1, held=self._group_name, library=self._groups.version,
            gpu=self._groups.device_name, host=own_host(),
        )  # fmt: skip

    def _drop_group(self) -> None:
        group, self._group, self._group_name, self._ranks = self._group, None, "", {}
        if group is not None:
            group.abort()

    def _lost_of(self, members: Sequence[Member]) -> Sequence[Member]:
        """Those whose server was lost after they joined."""
        return [m for m in members if self._lost.get(m.server, -1.0) >= self._seen.get(m.id, math.inf)]

    def _check_lost(self, members: Sequence[Member]) -> None:
        """Raises GroupBroken for a member whose server was lost."""
        lost = self._lost_of(members)
        if lost:
            raise GroupBroken(f"server {lost[0].server} was lost, as its control says")

    def _check_offered(self, offer: _Offer) -> None:
        if self._closed or self._offer is not offer:
            raise _Over


def warm_up(group: Group, device: torch.device, stall: float) -> None:
    """Both sides of a new group: make its connections and load its kernels, while nobody is paused."""
    with side_stream(device):
        for nbytes in WARM_UP_BYTES:
            group.broadcast(torch.zeros(nbytes, dtype=torch.uint8, device=device), src=0)
        group.wait(stall)


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Work that waits for no kernel of the model's; ahead of them where there is a choice."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield


class _Pulses:
    """Members' signs of life."""

    def __init__(self, add: Callable[[str, int], int], keys: RoundKeys, count: int, stall: float) -> None:
        self._add, self._keys, self._stall = add, keys, stall
        now = time.monotonic()
        self._seen = dict.fromkeys(range(1, 1 + count), (0, now))
        self._looked = now

    def check(self) -> None:
        """Raises GroupBroken for a member without a sign of life."""
        now = time.monotonic()
        if now - self._looked < PULSE:
            return
        self._looked = now
        for rank, (count, since) in self._seen.items():
            found = self._add(self._keys.alive(rank), 0)
            if found != count:
                self._seen[rank] = (found, now)
            elif now - since > self._stall:
                raise GroupBroken(f"member {rank} gave no sign of life for {self._stall:g} s")
