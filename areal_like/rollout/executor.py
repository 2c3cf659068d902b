"""Runs the sibling episodes of a group side by side, with retries, and hands back what is left of the group.

A sibling that fails for good is missing from its group, never a reward: groups of any size >= 1 are legal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from areal_like.api.engine import InferenceEngine
from areal_like.api.trajectory import Trajectory, TrajectoryTag
from areal_like.api.workflow import RolloutWorkflow
from areal_like.rollout.breaker import Breaker, BreakerStatistics
from areal_like.rollout.cursor import PromptVisit
from areal_like.rollout.episode import Converter, check_versions, own_cancellation_only, run_episode
from areal_like.rollout.episode_engine import EpisodeEngine, EpisodeIdentity
from areal_like.rollout.failure import FailureKind, kind_of, no_server_in
from areal_like.rollout.failure_log import FailureLog
from areal_like.rollout.filters import FilterVerdict, GroupFilters
from areal_like.rollout.lifecycle import GroupState

logger = logging.getLogger(__name__)


class GroupEnded(asyncio.CancelledError):
    """The group of this episode has ended: nothing of it counts any more, not even its failures.

    A cancellation, so that no ``except Exception`` of user code goes on with it.
    """


class TrajectorySink(Protocol):
    """Where finished trajectories are kept until they are trained on."""

    def put(self, trajectory: Trajectory) -> TrajectoryTag: ...

    def delete(self, keys: list[str]) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSettings:
    """``episode_timeout`` (s) also bounds accept_fn; ``episode_retries`` counts tries after the first, per kind."""

    seed: int
    n_samples: int
    episode_timeout: float
    episode_retries: int


@dataclass(slots=True, kw_only=True)
class GroupRun:
    """One group under way. ``dispatch`` stamps it at its first request and returns the stamp.

    ``newest_version`` tells the newest version that may have been served by now.
    ``lengths`` holds, per sibling, the tokens that its current try has generated so far. ``ended`` is set when the
    group is cut; from then on ``dispatch`` raises GroupEnded.
    """

    visit: PromptVisit
    row: Mapping[str, Any]
    dispatch: Callable[[], int]
    newest_version: Callable[[], int]
    lengths: list[int] = field(default_factory=list)
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """``state``: FINISHED with ``trajectories`` stored, or another way out without any, for ``reason``."""

    state: GroupState
    reason: str
    trajectories: tuple[TrajectoryTag, ...] = ()


_ENDED = GroupOutcome(state=GroupState.CANCELLED, reason="the group has ended")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorStatistics:
    """Counts since the run began. ``lost``: siblings that failed for good; ``failed`` counts each failed try."""

    accepted: int
    rejected: int
    failed: int
    lost: int
    generated_tokens: int
    breaker: BreakerStatistics


class GroupExecutor:
    """Turns a prompt into a stored group.

    Args:
        workflow, engine, convert: the user's task, what generates, and what checks its results.
        sink: stores trajectories of groups that pass ``filters``.
        settings: seed, siblings, time limit, retries.
        breaker: ends the run when nothing but failures comes back.
    """

    def __init__(
        self,
        *,
        workflow: RolloutWorkflow,
        engine: InferenceEngine,
        convert: Converter,
        sink: TrajectorySink,
        filters: GroupFilters,
        settings: ExecutorSettings,
        breaker: Breaker,
    ) -> None:
        self._workflow = workflow
        self._engine = engine
        self._convert = convert
        self._sink = sink
        self._filters = filters
        self._settings = settings
        self._breaker = breaker
        self._failures = FailureLog(logger)
        self._accepted = self._rejected = self._failed = self._lost = self._tokens = 0

    async def run(self, group: GroupRun) -> GroupOutcome:
        """Run every sibling, filter the group, and store what is kept.

        Raises:
            BreakerTripped, NoServerAvailable: as themselves or inside an exception group; the run cannot go on.
        """
        group.lengths[:] = [0] * self._settings.n_samples
        async with asyncio.TaskGroup() as siblings:
            tasks = [
                siblings.create_task(self._run_sibling(group, i), name=f"{group.visit.group_id}-s{i}")
                for i in range(self._settings.n_samples)
            ]
        results = [task.result() for task in tasks]
        if group.ended:
            return _ENDED
        if all(result is None for result in results):
            return GroupOutcome(state=GroupState.FAILED, reason="every episode failed")
        return await self._settle(group, [t for result in results if result for t in result])

    def discard(self, trajectories: tuple[TrajectoryTag, ...]) -> None:
        """Forget stored trajectories: they were trained on, or will never be."""
        if trajectories:
            self._sink.delete([t.key for t in trajectories])

    def statistics(self) -> ExecutorStatistics:
        return ExecutorStatistics(
            accepted=self._accepted,
            rejected=self._rejected,
            failed=self._failed,
            lost=self._lost,
            generated_tokens=self._tokens,
            breaker=self._breaker.statistics(),
        )

    async def _settle(self, group: GroupRun, trajectories: list[Trajectory]) -> GroupOutcome:
        try:
            with own_cancellation_only(f"accept_fn for group {group.visit.group_id}"):
                async with asyncio.timeout(self._settings.episode_timeout):
                    verdict = await self._filters.judge(trajectories)
        except Exception as error:  # the user's accept_fn: its group fails, as an episode would
            if group.ended:
                return _ENDED
            self._record(error, where=f"accept_fn for group {group.visit.group_id}")
            self._breaker.failure(error)
            return GroupOutcome(state=GroupState.FAILED, reason="accept_fn raised")
        if group.ended:
            return _ENDED
        if verdict is not FilterVerdict.KEPT:
            return GroupOutcome(state=GroupState.FILTERED, reason=verdict.value)
        return GroupOutcome(state=GroupState.FINISHED, reason=verdict.value, trajectories=self._store(trajectories))

    def _store(self, trajectories: list[Trajectory]) -> tuple[TrajectoryTag, ...]:
        tags: list[TrajectoryTag] = []
        try:
            tags.extend(self._sink.put(trajectory) for trajectory in trajectories)
        except BaseException:
            self.discard(tuple(tags))  # all of a group is stored, or none
            raise
        return tuple(tags)

    async def _run_sibling(self, group: GroupRun, sibling: int) -> tuple[Trajectory, ...] | None:
        """None when the sibling failed for good, or its group has ended; empty when its workflow rejected it."""
        failures = dict.fromkeys(FailureKind, 0)
        while True:
            identity = EpisodeIdentity(visit=group.visit, sibling=sibling, retry=sum(failures.values()))
            try:
                trajectories = await self._run_once(group, identity)
            except GroupEnded:
                return None
            except Exception as error:  # supervision boundary: user code may raise anything
                if group.ended:  # whatever it made of its cancellation
                    return None
                kind = kind_of(error)
                if (fatal := no_server_in(error)) is not None:
                    raise fatal from None
                failures[kind] += 1
                lost = kind is FailureKind.REQUEST or failures[kind] > self._settings.episode_retries
                self._count_failure(error, kind, lost=lost, where=f"episode {identity.episode_id}")
                if lost:
                    return None
                continue
            self._breaker.success()
            if trajectories:
                self._accepted += 1
            else:
                self._rejected += 1
            return trajectories

    async def _run_once(self, group: GroupRun, identity: EpisodeIdentity) -> tuple[Trajectory, ...]:
        group.lengths[identity.sibling] = 0

        def on_tokens(count: int) -> None:
            group.lengths[identity.sibling] += count
            self._tokens += count

        engine = EpisodeEngine(
            self._engine,
            identity=identity,
            run_seed=self._settings.seed,
            on_dispatch=group.dispatch,
            on_tokens=on_tokens,
        )
        trajectories = await run_episode(
            self._workflow,
            engine,
            group.row,
            identity=identity,
            time_limit=self._settings.episode_timeout,
            convert=self._convert,
        )
        if trajectories:
            check_versions(
                trajectories,
                stamp=group.dispatch(),
                newest=group.newest_version(),
                episode_id=identity.episode_id,
            )
        return trajectories

    def _count_failure(self, error: Exception, kind: FailureKind, *, lost: bool, where: str) -> None:
        """Infrastructure's failures are not held against the workflow while there are tries left."""
        self._record(error, where=where)
        self._lost += lost
        if lost or kind is not FailureKind.INFRASTRUCTURE:
            self._breaker.failure(error)

    def _record(self, error: Exception, *, where: str) -> None:
        self._failed += 1
        self._failures.record(error, where=where)
