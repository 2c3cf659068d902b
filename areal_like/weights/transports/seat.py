"""A receiver's place in a broadcast between GPUs (``weights.transports.nccl`` is the other end).

    prepare: join a round, be in its group     generation goes on; a thread of ours keeps saying that we live
    receive: say so, wait for "go", take the bytes; where a member was lost, meet again and take them anew

Whoever receives waits on events with deadlines, never on the store: a trainer that hangs holds up our thread, which
is left behind then, and not the engine. A trainer that stops in the middle of a broadcast is noticed by the group's
watchdog.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from areal_like.api.weights import Manifest
from areal_like.errors import WeightUpdateError
from areal_like.weights.nccl import Group, GroupBroken, Groups
from areal_like.weights.transports.meeting import Meeting, reach_store
from areal_like.weights.transports.nccl import warm_up
from areal_like.weights.transports.rounds import (
    PULSE,
    QUICK_LOOK,
    SLOW_LOOK,
    Member,
    RoundKeys,
    Terms,
    over_key,
    own_host,
)

#: seconds a receiver waits for the others, and for the trainer, while it is paused
GO_PATIENCE = 120.0
#: seconds until a round must have its terms
_JOIN_PATIENCE = 120.0
#: broken groups that a receiver leaves behind before it gives up
_MOST_ROUNDS = 4
#: seconds that one answer of the trainer's store may take
_STORE_TIMEOUT = 30.0
#: seconds until the trainer has been told that everything arrived
_FAREWELL = 2.0


class Membership:
    """What one process keeps from version to version: its name and the group that it is in."""

    def __init__(self, groups: Groups, device: torch.device, *, workers: int = 1) -> None:
        """``workers``: how many of them the server has, each in a process of its own."""
        self.groups, self.device, self.workers = groups, device, workers
        self.id = secrets.token_hex(8)
        #: common to the workers of one server
        self.server = self.id
        self.group: Group | None = None
        self.name = ""

    def as_member(self) -> Member:
        held = self.name if self.group is not None and not self.group.broken else ""
        return Member(
            id=self.id, server=self.server, workers=self.workers, held=held, library=self.groups.version,
            gpu=self.groups.device_name, host=own_host(),
        )  # fmt: skip

    def meet(self, terms: Terms, stall: float) -> Group:
        """Be in the group of ``terms``. Raises GroupBroken."""
        if not terms.unique_id and self.group is not None and self.name == terms.group:
            return self.group
        self.leave()
        if not terms.unique_id:
            raise GroupBroken("the trainer keeps a group that we are not in any more")
        self.group = self.groups.join(terms.unique_id, rank=terms.ranks[self.id], size=terms.size)
        self.name = terms.group
        warm_up(self.group, self.device, stall)
        return self.group

    def leave(self) -> None:
        group, self.group, self.name = self.group, None, ""
        if group is not None:
            group.abort()


class Seat:
    """One version's reception. ``prepare`` and ``receive`` are called once each, in this order."""

    def __init__(self, manifest: Manifest, membership: Membership) -> None:
        self._what = f"version {manifest.version}"
        self._meeting = Meeting.parse(manifest.location)
        self._membership = membership
        self._changed = threading.Condition()
        self._group: Group | None = None
        self._seated = self._wanted = self._left = self._told = False
        self._outcome: str | None = None
        self._error = ""
        self._pulse = time.monotonic()
        self._thread = threading.Thread(target=self._attend, name="weights-seat", daemon=True)

    @property
    def bucket_bytes(self) -> int:
        return self._meeting.bucket_bytes

    @property
    def stall(self) -> float:
        """Seconds without progress after which a member counts as lost."""
        return self._meeting.stall

    def prepare(self) -> None:
        """Until we are in a group. Raises WeightUpdateError."""
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._seated or self._error or self._left)
            if not self._seated:
                raise WeightUpdateError(f"{self._what}: {self._error or 'given up'}")

    def receive(self, take: Callable[[Group], None]) -> None:
        """Call ``take`` once the trainer sends; again, with another group, where the one that it had broke.

        Raises:
            WeightUpdateError: the trainer or the others do not come, or too many groups broke.
            Exception: whatever else ``take`` raised.
        """
        trouble = ""
        for _ in range(_MOST_ROUNDS):
            group = self._await_go()
            try:
                with group.watched(self.stall):
                    take(group)
                    group.wait(self.stall)
            except GroupBroken as error:
                trouble = str(error)
                self._report(trouble)
            except BaseException as error:
                self._report(f"{type(error).__name__}: {error}")
                self.leave()
                raise
            else:
                self._report("")
                return
        self.leave()
        raise WeightUpdateError(f"{self._what}: {_MOST_ROUNDS} groups broke, the last one with: {trouble}")

    def leave(self) -> None:
        """Take no part any more. The group is kept, if nothing broke."""
        with self._changed:
            self._left = True
            self._changed.notify_all()

    def _await_go(self) -> Group:
        deadline = time.monotonic() + GO_PATIENCE
        with self._changed:
            self._wanted = True
            self._changed.notify_all()
            while self._group is None or self._outcome is not None:
                now = time.monotonic()
                if self._error or self._left:
                    raise WeightUpdateError(f"{self._what}: {self._error or 'given up'}")
                if now > deadline:
                    self._give_up()
                    raise WeightUpdateError(f"{self._what}: the trainer sent nothing in {GO_PATIENCE:g} s")
                if self._seated and now - self._pulse > self.stall:
                    self._give_up()
                    raise WeightUpdateError(f"{self._what}: the trainer does not answer for {self.stall:g} s")
                self._changed.wait(0.1)
            return self._group

    def _give_up(self) -> None:
        self._left = True
        self._changed.notify_all()

    def _report(self, trouble: str) -> None:
        """Tell our thread how it went, and let it tell the trainer."""
        with self._changed:
            self._told, self._outcome = False, trouble
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._told or self._error or self._left, timeout=_FAREWELL)

    # -- the thread --

    def _attend(self) -> None:
        try:
            if self._membership.device.type == "cuda":
                torch.cuda.set_device(self._membership.device)
            store = reach_store(self._meeting, self._what, timeout=_STORE_TIMEOUT)
            number = 0
            while not self._left:
                number = self._attend_round(store, number)
                if number < 0:
                    return
        except Exception as error:  # the thread's last frame: what is not caught here would be lost
            with self._changed:
                self._error = str(error) or type(error).__name__
                self._changed.notify_all()

    def _attend_round(self, store: Store, number: int) -> int:
        """One round; the number of the next one that we should join, or -1 when all is done."""
        self._seated = self._seated and number == 0  # making another group takes its time, without a word
        keys, terms = self._join(store, number)
        rank = terms.ranks[self._membership.id]
        try:
            group = self._membership.meet(terms, self.stall)
        except GroupBroken as error:
            store.set(keys.broken, str(error))
            self._membership.leave()
            return keys.number + 1
        with self._changed:
            self._seated, self._pulse = True, time.monotonic()
            self._changed.notify_all()
        if not self._until_go(store, keys, rank):
            self._membership.leave()
            self._until_wanted(store)
            return keys.number + 1
        with self._changed:
            self._group, self._outcome = group, None
            self._changed.notify_all()
        trouble = self._until_taken(store, keys, rank, group)
        if trouble or self._left:
            self._membership.leave()
            store.set(keys.broken, trouble or "a member gave up")
        else:
            store.set(keys.done(rank), "1")
        with self._changed:
            self._group, self._told = None, True
            self._changed.notify_all()
        return keys.number + 1 if trouble else -1

    def _join(self, store: Store, number: int) -> tuple[RoundKeys, Terms]:
        """Of the first round from ``number`` on that takes us. Raises WeightUpdateError."""
        deadline = time.monotonic() + _JOIN_PATIENCE
        while True:
            keys = RoundKeys(key=self._meeting.key, number=number)
            place = store.add(keys.joined, 1)
            store.set(keys.member(place), self._membership.as_member().to_json())
            while not store.check([keys.terms]):
                self._beat(store)
                if store.check([keys.broken]):
                    break
                if time.monotonic() > deadline:
                    raise WeightUpdateError(f"the trainer took no notice of us in {_JOIN_PATIENCE:g} s")
                time.sleep(SLOW_LOOK)
            else:
                terms = Terms.from_json(store.get(keys.terms))
                if terms.fault:
                    raise WeightUpdateError(terms.fault)
                if self._membership.id in terms.ranks:
                    return keys, terms
            number += 1

    def _until_go(self, store: Store, keys: RoundKeys, rank: int) -> bool:
        """Keep our seat until it is wanted, and then until the trainer sends; False where the round broke."""
        said, beat = False, 0.0
        while not store.check([keys.go]):
            if store.check([keys.broken]):
                return False
            now = time.monotonic()
            if now - beat > PULSE:
                store.add(keys.alive(rank), 1)
                beat = now
            self._beat(store)
            with self._changed:
                if not self._wanted:
                    self._changed.wait(PULSE / 5)
                    continue
            if not said:
                store.set(keys.receiving(rank), "1")
                said = True
            time.sleep(QUICK_LOOK)
        return True

    def _until_wanted(self, store: Store) -> None:
        """A seat that was lost is taken again when it is needed: others would wait for us in vain, and paused."""
        while not (self._wanted or self._left):
            self._beat(store)  # not under the lock: the store may hang, and the engine must not
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._left, timeout=PULSE)

    def _until_taken(self, store: Store, keys: RoundKeys, rank: int, group: Group) -> str:
        """What went wrong while the bytes were taken; empty where nothing did. Others may tell before it shows."""
        beat = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._outcome is not None or self._left, timeout=PULSE / 5)
                if self._outcome is not None or self._left:
                    return self._outcome or ""
            try:
                if time.monotonic() - beat > PULSE:
                    store.add(keys.alive(rank), 1)
                    beat = time.monotonic()
                over = store.check([keys.broken])  # more often: who waits for the bytes is paused
            except RuntimeError:  # the trainer is gone, and the watchdog would see it later
                group.abort()
                raise
            if over:
                group.abort()

    def _beat(self, store: Store) -> None:
        """The trainer answered; and it still offers this version. Raises WeightUpdateError."""
        self._pulse = time.monotonic()
        if self._left:
            raise WeightUpdateError("given up")
        if store.check([over_key(self._meeting.key)]):
            raise WeightUpdateError("it is no longer offered; ask for the current one")
