"""The rollout controller: keeps as many groups under way as their data may be fresh, and hands out batches.

    prompt cursor --admission--> episodes --filters--> finished groups --batch rule--> take_batch --> release
         ^                          |                       |
         +------- cancelled --------+-----------------------+

* The producer consumes prompts; it waits for admission, and is woken by ended groups, batches taken, and acknowledged
  versions.
* ``take_batch`` consumes finished groups; it waits for the batch rule, and is woken by the same events.

Nothing polls. What may happen when is decided in :class:`~areal_like.rollout.ledger.GroupLedger`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Self

from areal_like.api.trajectory import Batch, GroupTag
from areal_like.errors import ArealLikeError, BreakerTripped, PromptsExhausted, RolloutsEnded
from areal_like.rollout.admission import AdmissionVerdict
from areal_like.rollout.batch_rule import BatchDecision, BatchVerdict
from areal_like.rollout.cursor import PromptCursor
from areal_like.rollout.episode import is_our_cancellation
from areal_like.rollout.executor import GroupEnded, GroupExecutor, GroupRun
from areal_like.rollout.failure import headline_of, root_of
from areal_like.rollout.ledger import GroupLedger
from areal_like.rollout.lifecycle import GroupState
from areal_like.rollout.statistics import GroupExit, RolloutStatistics, RolloutTally

logger = logging.getLogger(__name__)

#: groups filtered or failed in a row, with none kept, before that is worth a warning
_BARREN_GROUPS = 64
#: seconds that cancelled workflows may spend on cleaning up before the run ends without them
_STOP_GRACE = 5.0


@dataclass(slots=True)
class _Group:
    """A group that has not ended. ``tag`` is set once it is finished."""

    run: GroupRun
    task: asyncio.Task[None] | None = None
    tag: GroupTag | None = None


class RolloutController:
    """Async context manager that owns every group from admission to release.

    Args:
        ledger: limits, admission and batch rule.
        executor: runs a group's episodes and stores what they return.
        cursor: says which prompt is next.
        rows: the dataset; ``rows[prompt.index]`` is what the workflow receives.
        expiry_retries: under ``on_stale: drop``, how often a prompt may be tried again before it ends ``stale``.
        barren_limit: groups filtered or failed in a row, with none kept between them, that end the run.
        on_exit: told how every group ended (for logs, dumps and recovery); must not block.
    """

    def __init__(
        self,
        *,
        ledger: GroupLedger,
        executor: GroupExecutor,
        cursor: PromptCursor,
        rows: Sequence[Mapping[str, Any]],
        expiry_retries: int = 2,
        barren_limit: int = 1024,
        on_exit: Callable[[GroupExit], None] | None = None,
    ) -> None:
        self._ledger = ledger
        self._executor = executor
        self._cursor = cursor
        self._rows = rows
        self._expiry_retries = expiry_retries
        self._barren_limit = barren_limit
        self._on_exit = on_exit
        self._groups: dict[str, _Group] = {}
        self._tally = RolloutTally()
        self._may_admit = asyncio.Event()
        self._may_take = asyncio.Event()
        self._taking = False
        self._stopping = False
        self._failure: Exception | None = None
        self._failed = asyncio.Event()
        self._last_verdict: BatchVerdict | None = None
        self._producer: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._producer = asyncio.create_task(self._produce(), name="rollouts")
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()
        for group_id in reversed(self._ledger.taken()):
            self._cut(group_id, reason="stopped")

    async def take_batch(self, version: int) -> Batch:
        """Wait until the batch rule allows a batch for the trainer at ``version``, and take it.

        Raises:
            BreakerTripped: episodes keep failing, or groups being filtered.
            NoServerAvailable: nothing can generate any more.
            RolloutsEnded: the batch will never come; PromptsExhausted, if all that there was to do is done.
            ValueError: ``version`` is not the number of batches taken so far.
        """
        if self._taking:
            raise RuntimeError("RolloutController.take_batch: another call is still waiting; one trainer takes batches")
        self._taking = True
        try:
            return self._take(version, await self._batch_allowed(version))
        finally:
            self._taking = False

    def release(self, batch: Batch) -> None:
        """``batch`` was trained on: delete its tensors. Groups taken but missing from it were lost: they failed."""
        lost = self._ledger.release(group.group_id for group in batch.groups)
        for group in batch.groups:
            self._leave(group.group_id, GroupState.TRAINED, reason="released")
        for group_id in lost:
            self._leave(group_id, GroupState.FAILED, reason="lost after it was taken")

    def acknowledged(self, version: int) -> None:
        """Every server in rotation serves ``version`` or a later one.

        Raises:
            ValueError: it is older than before, or newer than the trainer's.
        """
        self._ledger.acknowledge(version)
        self._wake()

    async def stop(self) -> None:
        """Stop admitting, cancel what runs, and give its prompts back to the cursor. Idempotent.

        A batch that was taken may still be released afterwards.
        """
        self._stopping = True
        for group_id in reversed(self._ledger.live()):
            self._cut(group_id, reason="stopped")
        self._wake()
        if self._producer is not None:
            _, unfinished = await asyncio.wait({self._producer}, timeout=_STOP_GRACE)
            if unfinished:
                self._producer = None  # stopping again does not wait again
                logger.error("rollouts: a workflow has ignored its cancellation for %s s; leaving it", _STOP_GRACE)

    async def watch(self) -> NoReturn:
        """Wait until rollouts can go no further, and say why, whatever the trainer is doing meanwhile.

        Raises:
            BreakerTripped, NoServerAvailable, StoreFull: see :meth:`take_batch`.
        """
        await self._failed.wait()
        assert self._failure is not None, "set together"
        raise self._failure

    def statistics(self) -> RolloutStatistics:
        ledger, cursor, tally = self._ledger.statistics(), self._cursor.state(), self._tally
        states = ledger.counters.states
        return RolloutStatistics(
            acknowledged=ledger.acknowledged,
            batches_taken=ledger.batches_taken,
            admitted=ledger.counters.admitted,
            live=ledger.counters.live,
            running=ledger.counters.running,
            finished=states[GroupState.FINISHED],
            taken=states[GroupState.TAKEN],
            groups={state.value: count for state, count in ledger.counters.exits.items()},
            reasons=dict(tally.reasons),
            admission=self._admission(),
            batch=self._last_verdict,
            batches_waited=dict(tally.batches_waited),
            lag_last=tally.lag_last,
            lag_max=tally.lag_max,
            lag_mean=tally.lag_mean,
            multi_version_trajectories=tally.multi_version_trajectories,
            expired_groups=tally.expired_groups,
            expired_tokens=tally.expired_tokens,
            expired_by_length=dict(sorted(tally.expired_by_length.items())),
            episodes=self._executor.statistics(),
            epoch=cursor.epoch,
            prompts_returned=len(cursor.returned),
        )

    async def _produce(self) -> None:
        try:
            async with asyncio.TaskGroup() as groups:
                while not self._stopping:
                    while self._admission() is AdmissionVerdict.ADMIT:
                        self._start(groups)
                    await self._may_admit.wait()
                    self._may_admit.clear()
        except BaseException as failures:  # supervision boundary: whoever waits for a batch must hear of it
            if is_our_cancellation(failures):
                raise
            self._fail(failures)
        finally:
            self._stopping = True
            self._wake()

    def _admission(self) -> AdmissionVerdict:
        return self._ledger.admission(prompts_left=not self._cursor.exhausted, stopped=self._stopping)

    def _start(self, groups: asyncio.TaskGroup) -> None:
        visit = self._cursor.advance()
        group_id = visit.group_id
        run = GroupRun(
            visit=visit,
            row=self._rows[visit.prompt.index],
            dispatch=lambda: self._dispatch(group_id),
            newest_version=lambda: self._ledger.newest_version,
        )
        self._ledger.admit(group_id)
        group = self._groups[group_id] = _Group(run=run)
        group.task = groups.create_task(self._run(group), name=group_id)

    def _dispatch(self, group_id: str) -> int:
        if not self._ledger.is_live(group_id):
            # the group was cut, but its user code swallowed the cancellation and goes on: tell it again
            raise GroupEnded(f"group {group_id} has ended")
        return self._ledger.dispatch(group_id)

    async def _run(self, group: _Group) -> None:
        visit = group.run.visit
        try:
            outcome = await self._executor.run(group.run)
        except BaseException as error:
            if not is_our_cancellation(error):
                self._fail(error)  # now, not when the last of the other groups has been cancelled
            raise
        if not self._ledger.is_live(visit.group_id):
            self._executor.discard(outcome.trajectories)
            return
        if outcome.state is GroupState.FINISHED:
            self._tally.unkept_in_a_row = 0
            group.tag = self._ledger.finish(
                GroupTag(
                    group_id=visit.group_id,
                    prompt=visit.prompt,
                    attempt=visit.attempt,
                    stamp=group.run.dispatch(),
                    trajectories=outcome.trajectories,
                )
            )
        else:
            self._ledger.end(visit.group_id, outcome.state)
            self._leave(visit.group_id, outcome.state, reason=outcome.reason)
            self._mind_barren_filters()
        self._wake()

    def _fail(self, error: BaseException) -> None:
        """Rollouts end for ``error``, if none ended them before."""
        if self._failure is None:
            self._failure = _as_exception(root_of(error))
            self._failed.set()
            self._stopping = True
            logger.error("rollouts ended: %s", headline_of(self._failure))
            self._wake()

    def _mind_barren_filters(self) -> None:
        """A run whose every group is filtered would go on for ever."""
        row = self._tally.unkept_in_a_row
        told = (
            f"rollouts: none of the last {row} groups was kept for training; by reason: {dict(self._tally.reasons)}; "
            "look at rollout.accept_fn, rollout.drop_equal_rewards, and the episodes that return None"
        )
        if row >= self._barren_limit:
            self._fail(BreakerTripped(f"{told} (rollout.breaker_groups = {self._barren_limit})"))
        elif row >= _BARREN_GROUPS and row & (row - 1) == 0:
            logger.warning("%s", told)

    async def _batch_allowed(self, version: int) -> BatchDecision:
        waited: set[BatchVerdict] = set()
        while True:
            if self._failure is not None:
                raise self._failure
            if self._stopping:
                raise RolloutsEnded(f"no batch for version {version}: rollouts were stopped")
            decision = self._ledger.batch_decision(version, prompts_left=not self._cursor.exhausted)
            self._last_verdict = decision.verdict
            if decision.verdict is BatchVerdict.TAKE:
                self._tally.waited(waited)
                return decision
            if decision.verdict is BatchVerdict.EXHAUSTED:
                raise PromptsExhausted(f"no batch for version {version}: no prompt and no training step is left")
            waited.add(decision.verdict)
            self._may_take.clear()
            await self._may_take.wait()

    def _take(self, version: int, decision: BatchDecision) -> Batch:
        batch = Batch(version=version, groups=self._ledger.take(decision))
        self._tally.taken(batch)
        for group_id in reversed(self._ledger.overdue(version)):
            self._expire(group_id)
        self._may_admit.set()
        return batch

    def _expire(self, group_id: str) -> None:
        visit = self._groups[group_id].run.visit
        if visit.expired < self._expiry_retries:
            exit_ = self._cut(group_id, reason="expired", expired=True)
        else:
            exit_ = self._drop(group_id, GroupState.STALE, reason="expired")
        self._tally.expired(exit_)

    def _cut(self, group_id: str, *, reason: str, expired: bool = False) -> GroupExit:
        """The group ends, and its prompt returns to the front of the cursor."""
        exit_ = self._drop(group_id, GroupState.CANCELLED, reason=reason)
        self._cursor.give_back(exit_.visit, expired=expired)
        return exit_

    def _drop(self, group_id: str, state: GroupState, *, reason: str) -> GroupExit:
        self._ledger.end(group_id, state)
        group = self._groups[group_id]
        group.run.ended = True
        if group.task is not None:
            group.task.cancel()
        return self._leave(group_id, state, reason=reason)

    def _leave(self, group_id: str, state: GroupState, *, reason: str) -> GroupExit:
        """The ledger has ended the group: forget it here, with its tensors, and tell whoever listens."""
        group = self._groups.pop(group_id)
        if group.tag is not None:
            self._executor.discard(group.tag.trajectories)
        exit_ = GroupExit(visit=group.run.visit, state=state, reason=reason, lengths=tuple(group.run.lengths))
        self._tally.ended(exit_)
        if self._on_exit is not None:
            self._on_exit(exit_)
        return exit_

    def _wake(self) -> None:
        self._may_admit.set()
        self._may_take.set()


def _as_exception(error: BaseException) -> Exception:
    """``error`` as something that may be raised in another task: a CancelledError or SystemExit may not."""
    if isinstance(error, Exception):
        return error
    failure = ArealLikeError(f"rollouts were ended by {headline_of(error)}")
    failure.__cause__ = error
    return failure
