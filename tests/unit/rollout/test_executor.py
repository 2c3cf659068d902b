import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from areal_like.api import (
    EpisodeResult,
    InferenceEngine,
    ModelRequest,
    ModelResponse,
    RolloutWorkflow,
    StopReason,
    Trajectory,
)
from areal_like.api.trajectory import PromptId, TrajectoryTag
from areal_like.errors import BreakerTripped, NoServerAvailable, RequestError, RewardError, ServerUnavailable
from areal_like.rollout.breaker import Breaker
from areal_like.rollout.convert import to_trajectories
from areal_like.rollout.cursor import PromptVisit
from areal_like.rollout.executor import ExecutorSettings, GroupEnded, GroupExecutor, GroupOutcome, GroupRun
from areal_like.rollout.filters import GroupFilters
from areal_like.rollout.lifecycle import GroupState
from areal_like.rollout.store import StoreFull, TrajectoryStore

Episode = Callable[[InferenceEngine, int], Awaitable[EpisodeResult]]


class Engine:
    """Answers four tokens of version 3 and remembers the seeds."""

    def __init__(self) -> None:
        self.seeds: list[int | None] = []

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.seeds.append(request.seed)
        await asyncio.sleep(0)
        return ModelResponse(
            input_tokens=list(request.input_ids),
            output_tokens=[1] * 4,
            output_logprobs=[-1.0] * 4,
            output_versions=[3] * 4,
            stop_reason=StopReason.STOP,
        )

    def get_version(self) -> int:
        return 3


class Task(RolloutWorkflow):
    """Numbers its calls and lets ``episode`` decide."""

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.calls = 0

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> EpisodeResult:
        self.calls += 1
        return await self.episode(engine, self.calls)


def row(reward: float = 1.0, version: int = 3) -> Trajectory:
    return Trajectory(
        token_ids=np.array([1, 2]),
        loss_mask=np.array([0, 1]),
        logprobs=np.array([0.0, -1.0]),
        versions=np.array([-1, version]),
        reward=reward,
    )


class Bench:
    """An executor with real parts around one workflow function."""

    def __init__(
        self,
        episode: Episode,
        *,
        n_samples: int = 2,
        retries: int = 1,
        breaker_limit: int = 100,
        filters: GroupFilters | None = None,
        max_bytes: int = 2**20,
        timeout: float = 60.0,
    ) -> None:
        self.task, self.engine, self.store = Task(episode), Engine(), TrajectoryStore(max_bytes)
        self.breaker = Breaker(limit=breaker_limit)
        self.executor = GroupExecutor(
            workflow=self.task,
            engine=self.engine,
            convert=to_trajectories,
            sink=self.store,
            filters=filters or GroupFilters(),
            settings=ExecutorSettings(seed=1, n_samples=n_samples, episode_timeout=timeout, episode_retries=retries),
            breaker=self.breaker,
        )
        self.dispatches = 0
        self.group = GroupRun(
            visit=PromptVisit(prompt=PromptId(epoch=0, index=0)),
            row={},
            dispatch=self.dispatch,
            newest_version=lambda: 4,
        )

    def dispatch(self) -> int:
        self.dispatches += 1
        return 3

    async def run(self) -> GroupOutcome:
        return await self.executor.run(self.group)


async def generate(engine: InferenceEngine, call: int) -> Trajectory:
    await engine.agenerate(ModelRequest(input_ids=[1]))
    return row(float(call))


async def test_siblings_become_one_stored_group() -> None:
    bench = Bench(generate, n_samples=3)
    outcome = await bench.run()
    assert outcome.state is GroupState.FINISHED
    assert [tag.reward for tag in outcome.trajectories] == [1.0, 2.0, 3.0]
    assert {tag.group_id for tag in outcome.trajectories} == {"e0-p0-a0"}
    assert len({tag.episode_id for tag in outcome.trajectories}) == 3
    assert len(bench.store.get([tag.key for tag in outcome.trajectories])) == 3
    statistics = bench.executor.statistics()
    assert (statistics.accepted, statistics.failed, statistics.generated_tokens) == (3, 0, 12)
    assert bench.group.lengths == [4, 4, 4]


async def test_siblings_run_side_by_side() -> None:
    met = asyncio.Barrier(3)

    async def episode(engine: InferenceEngine, call: int) -> Trajectory:
        await met.wait()
        return row()

    assert (await Bench(episode, n_samples=3).run()).state is GroupState.FINISHED


async def test_a_failed_try_is_repeated_with_other_seeds() -> None:
    async def episode(engine: InferenceEngine, call: int) -> Trajectory:
        trajectory = await generate(engine, call)
        if call == 1:
            raise ValueError("the environment broke")
        return trajectory

    bench = Bench(episode, n_samples=1)
    outcome = await bench.run()
    assert [tag.episode_id for tag in outcome.trajectories] == ["e0-p0-a0-s0-r1"]
    assert len(set(bench.engine.seeds)) == 2
    assert bench.group.lengths == [4]  # of the try that counted
    assert bench.executor.statistics().generated_tokens == 8
    assert bench.breaker.statistics().total == 1


async def test_a_group_goes_on_without_a_sibling_that_failed_for_good() -> None:
    async def episode(engine: InferenceEngine, call: int) -> Trajectory:
        if call % 2:
            raise RewardError("no number")
        return row()

    bench = Bench(episode, n_samples=2, retries=0)
    outcome = await bench.run()
    assert (outcome.state, len(outcome.trajectories)) == (GroupState.FINISHED, 1)
    assert bench.executor.statistics().lost == 1


async def test_a_group_without_any_episode_left_has_failed() -> None:
    async def episode(engine: InferenceEngine, call: int) -> Trajectory:
        raise ValueError("always")

    bench = Bench(episode, n_samples=2, retries=2)
    assert (await bench.run()).state is GroupState.FAILED
    assert bench.task.calls == 6
    assert bench.executor.statistics().lost == 2


async def test_a_rejected_episode_contributes_nothing_and_is_no_failure() -> None:
    async def episode(engine: InferenceEngine, call: int) -> Trajectory | None:
        return row() if call == 1 else None

    bench = Bench(episode)
    assert len((await bench.run()).trajectories) == 1
    assert bench.executor.statistics().rejected == 1
    outcome = await bench.run()
    assert (outcome.state, outcome.reason) == (GroupState.FILTERED, "rejected")


async def test_failed_and_rejected_siblings_together_are_filtered() -> None:
    async def episode(engine: InferenceEngine, call: int) -> None:
        if call == 1:
            raise ValueError("once")

    assert (await Bench(episode, retries=0).run()).state is GroupState.FILTERED


async def test_infrastructure_is_retried_and_not_held_against_the_workflow() -> None:
    async def episode(engine: InferenceEngine, call: int) -> Trajectory:
        if call <= 2:
            raise RuntimeError("wrapped by the user's code") from ServerUnavailable("gone")
        return row()

    bench = Bench(episode, n_samples=1, retries=2, breaker_limit=1)
    assert (await bench.run()).state is GroupState.FINISHED
    assert bench.breaker.statistics().total == 0
    assert bench.executor.statistics().failed == 2


async def test_infrastructure_that_never_recovers_does_not_loop_for_ever() -> None:
    async def episode(engine: InferenceEngine, call: int) -> Trajectory:
        raise ServerUnavailable("gone")

    bench = Bench(episode, n_samples=1, retries=2)
    assert (await bench.run()).state is GroupState.FAILED
    assert (bench.task.calls, bench.breaker.statistics().total) == (3, 1)


async def test_a_request_that_can_never_succeed_is_not_repeated() -> None:
    async def episode(engine: InferenceEngine, call: int) -> Trajectory:
        raise RequestError("the prompt is too long")

    bench = Bench(episode, n_samples=1, retries=5)
    assert (await bench.run()).state is GroupState.FAILED
    assert bench.task.calls == 1


async def test_without_any_server_the_run_cannot_go_on() -> None:
    async def episode(engine: InferenceEngine, call: int) -> Trajectory:
        raise RuntimeError("turn 1") from NoServerAvailable("none in rotation")

    with pytest.RaisesGroup(pytest.RaisesExc(NoServerAvailable, match="none in rotation")):
        await Bench(episode, n_samples=1).run()


async def test_nothing_but_failures_trips_the_breaker() -> None:
    async def episode(engine: InferenceEngine, call: int) -> Trajectory:
        raise ValueError("always")

    with pytest.RaisesGroup(pytest.RaisesExc(BreakerTripped, match="ValueError: always")):
        await Bench(episode, n_samples=1, retries=100, breaker_limit=5).run()


@pytest.mark.parametrize("made_of_it", [None, KeyError("of the user's"), GroupEnded()])
async def test_nothing_of_an_ended_group_counts(made_of_it: BaseException | None) -> None:
    async def episode(engine: InferenceEngine, call: int) -> Trajectory:
        bench.group.ended = True
        bench.group.dispatch = ended
        try:
            return await generate(engine, call)
        except GroupEnded:
            if made_of_it is None:
                return row()
            raise made_of_it from None

    def ended() -> int:
        raise GroupEnded

    bench = Bench(episode)
    assert (await bench.run()).state is GroupState.CANCELLED
    statistics = bench.executor.statistics()
    assert (statistics.failed, statistics.accepted, statistics.breaker.total) == (0, 0, 0)
    assert bench.store.statistics().puts == 0


@pytest.mark.parametrize("version", [2, 5])
async def test_tokens_older_than_the_stamp_or_from_the_future_are_a_failed_episode(version: int) -> None:
    async def episode(engine: InferenceEngine, call: int) -> Trajectory:
        return row(version=version)

    assert (await Bench(episode, retries=0).run()).state is GroupState.FAILED


async def test_a_group_is_stamped_before_its_versions_are_judged() -> None:
    """A workflow that sends no request gets its stamp when its result is looked at."""

    async def episode(engine: InferenceEngine, call: int) -> Trajectory:
        return row()

    bench = Bench(episode, n_samples=1)
    await bench.run()
    assert bench.dispatches == 1


async def test_a_filtered_group_is_never_stored() -> None:
    bench = Bench(generate, filters=GroupFilters(accept_fn=lambda rows: False))
    outcome = await bench.run()
    assert (outcome.state, outcome.reason, outcome.trajectories) == (GroupState.FILTERED, "accept_fn", ())
    assert bench.store.statistics().puts == 0


def broken_filter(rows: list[Trajectory]) -> bool:
    raise KeyError("no such field")


async def cancelled_filter(rows: list[Trajectory]) -> bool:
    raise asyncio.CancelledError


async def endless_filter(rows: list[Trajectory]) -> bool:
    return await asyncio.Event().wait()


@pytest.mark.parametrize("accept", [broken_filter, cancelled_filter, endless_filter])
async def test_a_broken_accept_function_fails_its_group(accept: Any) -> None:
    bench = Bench(generate, filters=GroupFilters(accept_fn=accept), timeout=0.05)
    outcome = await bench.run()
    assert (outcome.state, outcome.reason) == (GroupState.FAILED, "accept_fn raised")
    assert bench.breaker.statistics().total == 1


async def test_of_a_group_that_does_not_fit_nothing_is_stored() -> None:
    bench = Bench(generate, n_samples=3, max_bytes=2500)  # two trajectories fit
    with pytest.raises(StoreFull):
        await bench.run()
    assert (bench.store.statistics().puts, bench.store.statistics().trajectories) == (2, 0)


async def test_discarding_forgets_the_tensors() -> None:
    bench = Bench(generate)
    outcome = await bench.run()
    bench.executor.discard(outcome.trajectories)
    assert bench.store.statistics().trajectories == 0
    nothing: tuple[TrajectoryTag, ...] = ()
    bench.executor.discard(nothing)
