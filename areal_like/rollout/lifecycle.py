"""The life of a group: which states there are, which moves are legal, and how many groups stand where.

    admitted --dispatch--> running --finish--> finished --take--> taken --end--> trained
        |                     |                    |                |
        +---------------------+--------------------+----------------+--end--> filtered | failed | stale | cancelled

Pure: no clocks, no tasks, no clients. Every way out has a name, and every group takes exactly one of them. Counters
are derived from the moves, so they always balance: ``admitted = live + taken + ended``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from areal_like.errors import ArealLikeError


class GroupState(StrEnum):
    """Where a group stands. A live group holds a slot; an ended one is forgotten and only counted."""

    ADMITTED = "admitted"  #: holds a slot; no request sent yet
    RUNNING = "running"  #: stamped: its first request was dispatched
    FINISHED = "finished"  #: accepted by the filters, waits for a batch
    TAKEN = "taken"  #: in the batch that is being trained
    TRAINED = "trained"
    FILTERED = "filtered"  #: rejected by a filter, or by every one of its episodes
    FAILED = "failed"  #: no episode of it succeeded, or it was lost after it was taken
    STALE = "stale"  #: too old, and its prompt has no tries left
    CANCELLED = "cancelled"  #: cut; its prompt returned to the cursor


_S = GroupState

#: a slot is held in these
LIVE = frozenset({_S.ADMITTED, _S.RUNNING, _S.FINISHED})
#: ways out
EXITS = frozenset({_S.TRAINED, _S.FILTERED, _S.FAILED, _S.STALE, _S.CANCELLED})

LEGAL_MOVES: Mapping[GroupState, frozenset[GroupState]] = MappingProxyType(
    {
        _S.ADMITTED: frozenset({_S.RUNNING, _S.FILTERED, _S.FAILED, _S.STALE, _S.CANCELLED}),
        _S.RUNNING: frozenset({_S.FINISHED, _S.FILTERED, _S.FAILED, _S.STALE, _S.CANCELLED}),
        _S.FINISHED: frozenset({_S.TAKEN, _S.STALE, _S.CANCELLED}),
        _S.TAKEN: frozenset({_S.TRAINED, _S.FAILED, _S.CANCELLED}),
        **{exit_: frozenset() for exit_ in EXITS},
    }
)


class IllegalMove(ArealLikeError):
    """A group was asked to make a move that its state does not allow, such as ending twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleCounters:
    """A snapshot: every group ever admitted, by where it stands or how it ended."""

    admitted: int
    states: Mapping[GroupState, int]

    @property
    def live(self) -> int:
        """Groups that hold a slot: admitted - dropped - taken."""
        return sum(self.states[s] for s in LIVE)

    @property
    def running(self) -> int:
        """Groups whose episodes run, whether or not they have sent a request yet."""
        return self.states[_S.ADMITTED] + self.states[_S.RUNNING]

    @property
    def exits(self) -> Mapping[GroupState, int]:
        return {s: self.states[s] for s in GroupState if s in EXITS}

    @property
    def balanced(self) -> bool:
        return self.admitted == sum(self.states.values()) and min(self.states.values()) >= 0


@dataclass(slots=True)
class _Record:
    state: GroupState
    sequence: int
    stamp: int | None = None


class Lifecycle:
    """Every live or taken group, its state and its stamp. Moves cost O(1)."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._states: Counter[GroupState] = Counter()
        self._live_stamps: Counter[int] = Counter()
        self._admitted = 0

    def admit(self, group_id: str) -> None:
        """Give the group a slot."""
        if group_id in self._records:
            raise IllegalMove(f"group {group_id!r} is already {self._records[group_id].state}; ids must be unique")
        self._records[group_id] = _Record(state=_S.ADMITTED, sequence=self._admitted)
        self._admitted += 1
        self._states[_S.ADMITTED] += 1

    def dispatch(self, group_id: str, acknowledged: int) -> int:
        """Stamp the group at its first request, and return its stamp; later requests change nothing.

        ``acknowledged`` is the lowest version that any server in rotation serves: no token can be older.
        """
        record = self._record(group_id)
        if record.stamp is None:
            self._move(group_id, record, _S.RUNNING)
            record.stamp = acknowledged
            self._live_stamps[acknowledged] += 1
        return record.stamp

    def finish(self, group_id: str, oldest_version: int) -> int:
        """The group's episodes are done and accepted. Its oldest token may raise the stamp; returns the stamp."""
        record = self._record(group_id)
        self._move(group_id, record, _S.FINISHED)
        assert record.stamp is not None, "only running groups finish, and they are stamped"
        if oldest_version > record.stamp:
            self._forget_stamp(record.stamp)
            self._live_stamps[oldest_version] += 1
            record.stamp = oldest_version
        return record.stamp

    def take(self, group_id: str) -> None:
        """The group goes into a batch, and gives its slot back."""
        record = self._record(group_id)
        self._move(group_id, record, _S.TAKEN)
        self._forget_stamp(record.stamp)

    def end(self, group_id: str, exit_: GroupState) -> None:
        """The group leaves by ``exit_``; its slot, if it still holds one, is free."""
        if exit_ not in EXITS:
            raise IllegalMove(f"group {group_id!r} cannot end as {exit_}; ways out: {', '.join(sorted(EXITS))}")
        record = self._record(group_id)
        held_slot = record.state in LIVE
        self._move(group_id, record, exit_)
        if held_slot:
            self._forget_stamp(record.stamp)
        del self._records[group_id]

    def state(self, group_id: str) -> GroupState | None:
        """None once the group has ended (or was never admitted)."""
        record = self._records.get(group_id)
        return record.state if record is not None else None

    def stamp(self, group_id: str) -> int | None:
        return self._record(group_id).stamp

    def sequence(self, group_id: str) -> int:
        """How many groups were admitted before this one."""
        return self._record(group_id).sequence

    @property
    def live(self) -> int:
        return sum(self._states[s] for s in LIVE)

    @property
    def running(self) -> int:
        return self._states[_S.ADMITTED] + self._states[_S.RUNNING]

    @property
    def unstamped(self) -> int:
        return self._states[_S.ADMITTED]

    @property
    def live_stamps(self) -> Mapping[int, int]:
        """Number of live groups per stamp; groups that sent no request yet are not among them."""
        return MappingProxyType(self._live_stamps)

    def groups(self, *states: GroupState) -> Iterator[tuple[str, int | None]]:
        """(group id, stamp) of every group in one of ``states``, oldest admission first."""
        return ((i, r.stamp) for i, r in self._records.items() if r.state in states)

    def counters(self) -> LifecycleCounters:
        return LifecycleCounters(
            admitted=self._admitted, states=MappingProxyType({s: self._states[s] for s in GroupState})
        )

    def _record(self, group_id: str) -> _Record:
        record = self._records.get(group_id)
        if record is None:
            raise IllegalMove(f"group {group_id!r} was never admitted or has already ended; a group ends exactly once")
        return record

    def _move(self, group_id: str, record: _Record, target: GroupState) -> None:
        if target not in LEGAL_MOVES[record.state]:
            legal = ", ".join(sorted(LEGAL_MOVES[record.state]))
            raise IllegalMove(f"group {group_id!r} cannot go from {record.state} to {target}; legal: {legal}")
        self._states[record.state] -= 1
        self._states[target] += 1
        record.state = target

    def _forget_stamp(self, stamp: int | None) -> None:
        if stamp is None:
            return
        self._live_stamps[stamp] -= 1
        if not self._live_stamps[stamp]:
            del self._live_stamps[stamp]
