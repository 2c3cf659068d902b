"""The staleness contract in one pure object: groups, stamps, batches taken, and the two rules over them.

It owns no tasks, clients or clocks; the controller tells it what happened and asks what may happen next. With t
batches taken, s acknowledged, B groups per batch, it keeps this invariant (docs/staleness.md):

    for every h >= t - eta, at most (h + eta + 1 - t) * B live groups are stamped <= h
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from areal_like.api.trajectory import GroupTag
from areal_like.errors import ArealLikeError
from areal_like.rollout import admission, batch_rule
from areal_like.rollout.admission import AdmissionFacts, AdmissionVerdict, StalenessLimits
from areal_like.rollout.batch_rule import BatchDecision, BatchFacts, BatchVerdict, OnStale
from areal_like.rollout.buffer import FinishedBuffer
from areal_like.rollout.lifecycle import LIVE, GroupState, Lifecycle, LifecycleCounters


class StalenessBroken(ArealLikeError):
    """A group older than the bound was about to be trained on."""


BatchRule: TypeAlias = Callable[[StalenessLimits, OnStale, BatchFacts], BatchDecision]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerStatistics:
    """A snapshot. ``acknowledged`` is None before the first publication."""

    counters: LifecycleCounters
    batches_taken: int
    acknowledged: int | None
    live_stamps: Mapping[int, int]


class GroupLedger:
    """Admission, stamps, batches and exits of all groups of a run.

    Args:
        limits: B, eta, T and the concurrency cap.
        on_stale: what keeps groups from growing too old.
        first_version: version, and number of batches taken, at which this run starts (0 unless resumed).
        rule: the batch rule; another one is for experiments and for tests that show what the real one prevents.
    """

    def __init__(
        self,
        limits: StalenessLimits,
        on_stale: OnStale = OnStale.WAIT,
        *,
        first_version: int = 0,
        rule: BatchRule = batch_rule.decide,
    ) -> None:
        self._limits = limits
        self._on_stale = on_stale
        self._rule = rule
        self._lifecycle = Lifecycle()
        self._finished = FinishedBuffer()
        self._batches_taken = first_version
        self._acknowledged: int | None = None

    def acknowledge(self, version: int) -> None:
        """``version`` is now the lowest that any server in rotation serves.

        Raises:
            ValueError: it fell (a restore starts a new ledger), or it is newer than the trainer's.
        """
        if self._acknowledged is not None and version < self._acknowledged:
            raise ValueError(
                f"GroupLedger.acknowledge: the acknowledged version fell from {self._acknowledged} to {version}; "
                f"a server that is behind must leave the rotation before it is counted"
            )
        if version > self._batches_taken:
            raise ValueError(
                f"GroupLedger.acknowledge: version {version} cannot exist after {self._batches_taken} batches; "
                f"every version takes one batch"
            )
        self._acknowledged = version

    def admission(self, *, prompts_left: bool, stopped: bool = False) -> AdmissionVerdict:
        """Whether one more group may enter now."""
        return admission.decide(
            self._limits,
            AdmissionFacts(
                live=self._lifecycle.live,
                running=self._lifecycle.running,
                batches_taken=self._batches_taken,
                acknowledged=self._acknowledged,
                prompts_left=prompts_left,
                stopped=stopped,
            ),
        )

    @property
    def newest_version(self) -> int:
        """No server can serve a later one: version v is made of the first v batches."""
        return self._batches_taken

    def admit(self, group_id: str) -> None:
        """Give the group a slot; call only after :meth:`admission` said so."""
        self._lifecycle.admit(group_id)

    def dispatch(self, group_id: str) -> int:
        """The group sends a request: stamp it if this is its first. Returns the stamp."""
        return self._lifecycle.dispatch(group_id, self._served())

    def finish(self, group: GroupTag) -> GroupTag:
        """The group's episodes are done and its filters passed. Returns it with the stamp that its tokens allow."""
        stamp = self._lifecycle.finish(group.group_id, group.oldest_version)
        group = replace(group, stamp=stamp)
        self._finished.add(group, sequence=self._lifecycle.sequence(group.group_id))
        return group

    def end(self, group_id: str, exit_: GroupState) -> None:
        """The group leaves by ``exit_``."""
        state, stamp = self._lifecycle.state(group_id), self._lifecycle.stamp(group_id)
        self._lifecycle.end(group_id, exit_)
        if state is GroupState.FINISHED:
            assert stamp is not None, "finished groups are stamped"
            self._finished.remove(group_id, stamp=stamp)

    def is_live(self, group_id: str) -> bool:
        return self._lifecycle.state(group_id) in LIVE

    def batch_decision(self, version: int, *, prompts_left: bool) -> BatchDecision:
        """Whether the trainer at ``version`` may take a batch now.

        Raises:
            ValueError: ``version`` is not the number of batches taken.
        """
        if version != self._batches_taken:
            raise ValueError(
                f"GroupLedger: a batch was asked for version {version}, but {self._batches_taken} batches were taken; "
                f"version v takes batch v (counted from 0), once"
            )
        if version >= self._limits.total_train_steps:
            return BatchDecision(verdict=BatchVerdict.EXHAUSTED)
        if self._acknowledged is None:
            return BatchDecision(verdict=BatchVerdict.TOO_FEW)
        facts = BatchFacts(
            version=version,
            finished=self._finished.counts,
            live=self._lifecycle.live_stamps,
            unstamped=self._lifecycle.unstamped,
            acknowledged=self._acknowledged,
            ended=not prompts_left and not self._lifecycle.running,
        )
        return self._rule(self._limits, self._on_stale, facts)

    def take(self, decision: BatchDecision) -> tuple[GroupTag, ...]:
        """Take the groups that :meth:`batch_decision` chose, in order of admission.

        Raises:
            StalenessBroken: one of them is older than eta allows, which the rules make impossible; none is taken.
        """
        groups = self._finished.first(decision.chosen)
        for group in groups:
            self._check_fresh(group)
        for group in groups:
            self._lifecycle.take(group.group_id)
            self._finished.remove(group.group_id, stamp=group.stamp)
        self._batches_taken += 1
        return groups

    def overdue(self, version: int) -> tuple[str, ...]:
        """Under ``drop``: live groups that no batch after that of ``version`` may take, oldest admission first.

        A group that has sent no request yet will be stamped at s or later, so s stands in for its stamp.
        """
        if self._on_stale is not OnStale.DROP:
            return ()
        served = self._served()
        return tuple(
            group_id
            for group_id, stamp in self._lifecycle.groups(*LIVE)
            if batch_rule.is_overdue(self._limits, stamp=served if stamp is None else stamp, version=version)
        )

    def taken(self) -> tuple[str, ...]:
        """Groups that were taken and not released yet."""
        return tuple(group_id for group_id, _ in self._lifecycle.groups(GroupState.TAKEN))

    def release(self, trained: Iterable[str]) -> tuple[str, ...]:
        """The taken groups are done: those in ``trained`` were trained, the others were lost. Returns the lost."""
        kept = set(trained)
        lost = tuple(group_id for group_id in self.taken() if group_id not in kept)
        for group_id in kept:
            self._lifecycle.end(group_id, GroupState.TRAINED)
        for group_id in lost:
            self._lifecycle.end(group_id, GroupState.FAILED)
        return lost

    def live(self) -> tuple[str, ...]:
        """Groups that hold a slot, oldest admission first."""
        return tuple(group_id for group_id, _ in self._lifecycle.groups(*LIVE))

    def statistics(self) -> LedgerStatistics:
        return LedgerStatistics(
            counters=self._lifecycle.counters(),
            batches_taken=self._batches_taken,
            acknowledged=self._acknowledged,
            live_stamps=dict(self._lifecycle.live_stamps),
        )

    def _check_fresh(self, group: GroupTag) -> None:
        lag = self._batches_taken - group.oldest_version
        if self._on_stale is not OnStale.TRAIN and lag > self._limits.max_head_offpolicyness:
            raise StalenessBroken(
                f"group {group.group_id} (stamp {group.stamp}) has lag {lag} at version {self._batches_taken}, but "
                f"max_head_offpolicyness is {self._limits.max_head_offpolicyness}; this is a fault of areal_like"
            )

    def _served(self) -> int:
        if self._acknowledged is None:
            raise ValueError("GroupLedger: no version has been acknowledged yet; publish before generating")
        return self._acknowledged
