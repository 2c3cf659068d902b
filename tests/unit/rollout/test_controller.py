import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
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
from areal_like.api.trajectory import Batch
from areal_like.errors import ArealLikeError, BreakerTripped, NoServerAvailable, PromptsExhausted, RolloutsEnded
from areal_like.rollout import controller as controller_module
from areal_like.rollout.admission import AdmissionVerdict, StalenessLimits
from areal_like.rollout.batch_rule import BatchVerdict, OnStale
from areal_like.rollout.breaker import Breaker
from areal_like.rollout.controller import RolloutController
from areal_like.rollout.convert import to_trajectories
from areal_like.rollout.cursor import PromptCursor
from areal_like.rollout.executor import ExecutorSettings, GroupExecutor, GroupRun
from areal_like.rollout.filters import GroupFilters
from areal_like.rollout.ledger import GroupLedger
from areal_like.rollout.lifecycle import GroupState
from areal_like.rollout.statistics import GroupExit
from areal_like.rollout.store import StoreFull, TrajectoryStore

Episode = Callable[[InferenceEngine, int], Awaitable[EpisodeResult]]


@dataclass
class Engine:
    """Answers two tokens of the current version at once."""

    version: int = 0

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        return ModelResponse(
            input_tokens=list(request.input_ids),
            output_tokens=[1, 1],
            output_logprobs=[-1.0, -1.0],
            output_versions=[self.version] * 2,
            stop_reason=StopReason.STOP,
        )

    def get_version(self) -> int:
        return self.version


@dataclass
class Task(RolloutWorkflow):
    episode: Episode

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> EpisodeResult:
        return await self.episode(engine, data["index"])


async def generate(engine: InferenceEngine, index: int) -> Trajectory:
    answer = await engine.agenerate(ModelRequest(input_ids=[index]))
    return Trajectory(
        token_ids=np.array([index, *answer.output_tokens]),
        loss_mask=np.array([0, 1, 1]),
        logprobs=np.array([0.0, *answer.output_logprobs]),
        versions=np.array([-1, *answer.output_versions]),
        reward=float(index),
    )


@dataclass
class Bench:
    """A controller with real parts around one workflow function; prompts come in the order of their rows."""

    episode: Episode = generate
    batch_size: int = 2
    eta: int = 0
    steps: int = 4
    concurrent: int = 100
    on_stale: OnStale = OnStale.WAIT
    n_prompts: int = 100
    epochs: int | None = None
    breaker_limit: int = 100
    max_bytes: int = 2**20
    expiry_retries: int = 1
    barren_limit: int = 1000
    engine: Engine = field(default_factory=Engine)
    exits: list[GroupExit] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = TrajectoryStore(self.max_bytes)
        self.cursor = PromptCursor(n_prompts=self.n_prompts, seed=1, shuffle=False, epochs=self.epochs)
        executor = GroupExecutor(
            workflow=Task(self.episode),
            engine=self.engine,
            convert=to_trajectories,
            sink=self.store,
            filters=GroupFilters(),
            settings=ExecutorSettings(seed=1, n_samples=1, episode_timeout=60.0, episode_retries=0),
            breaker=Breaker(limit=self.breaker_limit),
        )
        limits = StalenessLimits(
            batch_size=self.batch_size,
            max_head_offpolicyness=self.eta,
            total_train_steps=self.steps,
            max_concurrent_rollouts=self.concurrent,
        )
        self.controller = RolloutController(
            ledger=GroupLedger(limits, self.on_stale),
            executor=executor,
            cursor=self.cursor,
            rows=[{"index": index} for index in range(self.n_prompts)],
            expiry_retries=self.expiry_retries,
            barren_limit=self.barren_limit,
            on_exit=self.exits.append,
        )

    def publish(self, version: int) -> None:
        self.engine.version = version
        self.controller.acknowledged(version)

    def ended(self, state: GroupState) -> list[int]:
        return [exit_.visit.prompt.index for exit_ in self.exits if exit_.state is state]


def prompts(batch: Batch) -> list[int]:
    return [group.prompt.index for group in batch.groups]


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until ``condition`` holds; the test's own time limit ends what never comes true."""
    while not condition():  # noqa: ASYNC110 - any event of the controller may make it true
        await asyncio.sleep(0)


async def test_eta_zero_is_synchronous_through_the_same_code() -> None:
    bench = Bench(eta=0, steps=3)
    async with bench.controller as controller:
        for version in range(3):
            bench.publish(version)
            batch = await controller.take_batch(version)
            assert prompts(batch) == [2 * version, 2 * version + 1]
            assert batch.lags == (0, 0)
            assert controller.statistics().admission in (AdmissionVerdict.STALENESS, AdmissionVerdict.END_OF_RUN)
            controller.release(batch)
        statistics = controller.statistics()
        assert statistics.groups == {"trained": 6, "filtered": 0, "failed": 0, "stale": 0, "cancelled": 0}
        assert (statistics.admitted, statistics.live) == (6, 0)
        with pytest.raises(RolloutsEnded, match="no training step is left"):
            await controller.take_batch(3)
    assert bench.store.statistics().trajectories == 0


async def test_nothing_starts_before_a_version_is_acknowledged() -> None:
    bench = Bench()
    async with bench.controller as controller:
        waiting = asyncio.create_task(controller.take_batch(0))
        await until(lambda: controller.statistics().batch is not None)
        assert controller.statistics().admission is AdmissionVerdict.UNPUBLISHED
        assert controller.statistics().admitted == 0
        bench.publish(0)
        assert prompts(await waiting) == [0, 1]


async def test_rollouts_go_on_while_a_batch_is_trained() -> None:
    bench = Bench(eta=1)
    async with bench.controller as controller:
        bench.publish(0)
        batch = await controller.take_batch(0)
        await until(lambda: controller.statistics().finished == 2)
        assert controller.statistics().admission is AdmissionVerdict.STALENESS
        bench.publish(1)
        controller.release(batch)
        assert (await controller.take_batch(1)).lags == (1, 1)
        assert controller.statistics().lag_mean == 0.5


async def test_a_batch_waits_for_the_group_that_is_due_and_is_woken_by_it() -> None:
    gate = asyncio.Event()

    async def episode(engine: InferenceEngine, index: int) -> Trajectory:
        trajectory = await generate(engine, index)
        if index == 0:
            await gate.wait()
        return trajectory

    bench = Bench(episode, eta=1)
    async with bench.controller as controller:
        bench.publish(0)
        controller.release(await controller.take_batch(0))
        bench.publish(1)
        waiting = asyncio.create_task(controller.take_batch(1))
        await until(lambda: controller.statistics().batch is BatchVerdict.OLDER_FIRST)
        before = controller.statistics().batches_waited.get("older_first", 0)
        gate.set()
        assert prompts(await waiting) == [0, 3]
        waited = controller.statistics().batches_waited  # counted when it is over, and once, however often it looked
        assert (before, waited["older_first"]) == (0, 1)


async def test_at_most_so_many_groups_run() -> None:
    running, most = 0, 0

    async def episode(engine: InferenceEngine, index: int) -> Trajectory:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return await generate(engine, index)

    bench = Bench(episode, batch_size=8, concurrent=3)
    async with bench.controller as controller:
        bench.publish(0)
        await controller.take_batch(0)
    assert most == 3


async def test_a_workflow_that_only_fails_ends_the_wait_with_its_exception() -> None:
    async def episode(engine: InferenceEngine, index: int) -> Trajectory:
        raise ValueError("always")

    bench = Bench(episode, breaker_limit=5)
    async with bench.controller as controller:
        bench.publish(0)
        for _ in range(2):  # whoever asks again is told again
            with pytest.raises(BreakerTripped, match="ValueError: always"):
                await controller.take_batch(0)
    statistics = bench.controller.statistics()
    assert statistics.admitted == sum(statistics.groups.values())


async def test_a_failure_is_seen_although_no_batch_is_asked_for() -> None:
    async def episode(engine: InferenceEngine, index: int) -> Trajectory:
        raise ValueError("always")

    bench = Bench(episode, breaker_limit=5)
    async with bench.controller as controller, asyncio.timeout(10):
        bench.publish(0)
        with pytest.raises(BreakerTripped, match="ValueError: always"):
            await controller.watch()


async def test_a_failure_is_told_before_the_other_groups_have_cleaned_up() -> None:
    cleaned_up = asyncio.Event()

    async def episode(engine: InferenceEngine, index: int) -> Trajectory:
        if index == 0:
            raise ValueError("always")
        try:
            await asyncio.Event().wait()
        finally:
            await cleaned_up.wait()
        raise AssertionError

    bench = Bench(episode, breaker_limit=1)
    async with bench.controller as controller:
        bench.publish(0)
        with pytest.raises(BreakerTripped):
            await controller.take_batch(0)
        cleaned_up.set()


async def test_a_run_that_keeps_nothing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def episode(engine: InferenceEngine, index: int) -> None:
        await asyncio.sleep(0)

    bench = Bench(episode)
    async with bench.controller as controller:
        bench.publish(0)
        await until(lambda: controller.statistics().groups["filtered"] >= 300)
    warnings = [record.getMessage() for record in caplog.records if "was kept for training" in record.getMessage()]
    assert ["64 groups" in warnings[0], "128 groups" in warnings[1], "256 groups" in warnings[2]] == [True] * 3
    assert len(warnings) == 3
    assert "filtered/rejected" in warnings[0]


async def test_a_run_that_keeps_nothing_for_too_long_ends() -> None:
    async def episode(engine: InferenceEngine, index: int) -> None:
        await asyncio.sleep(0)

    bench = Bench(episode, barren_limit=20)
    async with bench.controller as controller:
        bench.publish(0)
        with pytest.raises(BreakerTripped, match=r"last 20 groups .*'filtered/rejected': 20.*breaker_groups = 20"):
            await controller.take_batch(0)


async def test_one_group_that_is_kept_is_enough_to_go_on() -> None:
    async def episode(engine: InferenceEngine, index: int) -> Trajectory | None:
        return await generate(engine, index) if index % 20 == 19 else None

    bench = Bench(episode, barren_limit=20, batch_size=4, concurrent=1)
    async with bench.controller as controller:
        bench.publish(0)
        assert prompts(await controller.take_batch(0)) == [19, 39, 59, 79]


class Panic(BaseException):
    """No Exception."""


@pytest.mark.parametrize("error", [Panic("in Rust"), asyncio.CancelledError("stray")])
async def test_what_is_no_exception_ends_the_wait_with_an_error(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(group: GroupRun) -> None:
        raise error

    monkeypatch.setattr(GroupExecutor, "run", staticmethod(fails))
    bench = Bench()
    async with bench.controller as controller:
        bench.publish(0)
        with pytest.raises(ArealLikeError, match=rf"rollouts were ended by {type(error).__name__}") as raised:
            await controller.take_batch(0)
        assert raised.value.__cause__ is error
        assert not isinstance(raised.value, RolloutsEnded)


async def test_a_cut_groups_episode_that_goes_on_is_no_failure() -> None:
    gate, over = asyncio.Event(), asyncio.Event()

    async def episode(engine: InferenceEngine, index: int) -> Trajectory:
        if index == 1:
            return await generate(engine, index)
        await gate.wait()
        try:
            return await generate(engine, index)  # before the cancellation has reached this task
        finally:
            over.set()

    bench = Bench(episode, breaker_limit=1)
    async with bench.controller as controller:
        bench.publish(0)
        await until(lambda: controller.statistics().finished == 1)
        gate.set()
        await controller.stop()
        assert over.is_set()
        assert controller.statistics().episodes.failed == 0


async def test_no_version_is_newer_than_the_batches_taken() -> None:
    async def episode(engine: InferenceEngine, index: int) -> Trajectory:
        trajectory = await generate(engine, index)
        return replace(trajectory, versions=trajectory.versions + np.array([0, 0, index > 1]))

    bench = Bench(episode, eta=1, batch_size=2, breaker_limit=1)
    async with bench.controller as controller:
        bench.publish(0)
        with pytest.raises(BreakerTripped, match="version 1, but the newest version made so far is 0"):
            await controller.watch()


async def test_without_a_server_the_wait_ends() -> None:
    async def episode(engine: InferenceEngine, index: int) -> Trajectory:
        raise NoServerAvailable("none in rotation")

    bench = Bench(episode)
    async with bench.controller as controller:
        bench.publish(0)
        with pytest.raises(NoServerAvailable, match="none in rotation"):
            await controller.take_batch(0)


async def test_a_full_store_ends_the_wait() -> None:
    bench = Bench(max_bytes=100)
    async with bench.controller as controller:
        bench.publish(0)
        with pytest.raises(StoreFull):
            await controller.take_batch(0)


async def test_stopping_cancels_what_runs_and_returns_its_prompts() -> None:
    cleaned_up = []

    async def episode(engine: InferenceEngine, index: int) -> Trajectory:
        if index == 1:
            return await generate(engine, index)
        try:
            await asyncio.Event().wait()
        finally:
            cleaned_up.append(index)
        raise AssertionError

    bench = Bench(episode, eta=1)
    async with bench.controller as controller:
        bench.publish(0)
        waiting = asyncio.create_task(controller.take_batch(0))
        await until(lambda: controller.statistics().finished == 1)
        await controller.stop()
        await controller.stop()
        assert sorted(cleaned_up) == [0, 2, 3]
        with pytest.raises(RolloutsEnded, match="stopped"):
            await waiting
        assert controller.statistics().groups["cancelled"] == 4
        assert controller.statistics().admission is AdmissionVerdict.STOPPED
    assert [visit.prompt.index for visit in bench.cursor.state().returned] == [0, 1, 2, 3]
    assert [visit.attempt for visit in bench.cursor.state().returned] == [1] * 4
    assert bench.store.statistics().trajectories == 0


async def test_a_batch_may_be_released_after_the_stop() -> None:
    bench = Bench()
    async with bench.controller as controller:
        bench.publish(0)
        batch = await controller.take_batch(0)
        await controller.stop()
        assert len(bench.store.get([t.key for t in batch.trajectories])) == 2
        controller.release(batch)
    assert bench.ended(GroupState.TRAINED) == [0, 1]


async def test_a_batch_that_is_never_released_returns_its_prompts() -> None:
    bench = Bench()
    async with bench.controller as controller:
        bench.publish(0)
        await controller.take_batch(0)
    assert bench.ended(GroupState.CANCELLED) == [1, 0]
    assert [visit.prompt.index for visit in bench.cursor.state().returned] == [0, 1]
    assert bench.store.statistics().trajectories == 0


async def test_a_group_lost_after_it_was_taken_shrinks_its_batch() -> None:
    bench = Bench()
    async with bench.controller as controller:
        bench.publish(0)
        batch = await controller.take_batch(0)
        controller.release(Batch(version=0, groups=batch.groups[1:]))
    assert (bench.ended(GroupState.FAILED), bench.ended(GroupState.TRAINED)) == ([0], [1])
    assert bench.store.statistics().trajectories == 0


async def test_expired_groups_are_cut_and_tried_again_until_their_tries_are_spent() -> None:
    async def episode(engine: InferenceEngine, index: int) -> Trajectory:
        trajectory = await generate(engine, index)
        if index == 0:
            await asyncio.Event().wait()
        return trajectory

    bench = Bench(episode, eta=1, on_stale=OnStale.DROP, steps=6, expiry_retries=1)
    async with bench.controller as controller:
        for version in range(5):
            bench.publish(version)
            batch = await controller.take_batch(version)
            assert max(batch.lags) <= 1
            controller.release(batch)
        statistics = controller.statistics()
    slow = [exit_ for exit_ in bench.exits if exit_.visit.prompt.index == 0]
    assert [exit_.state for exit_ in slow] == [GroupState.CANCELLED, GroupState.STALE]
    assert [exit_.visit.attempt for exit_ in slow] == [0, 1]
    assert statistics.expired_groups == 2
    assert statistics.expired_by_length == {2: 2}  # it had generated two tokens each time
    assert statistics.expired_tokens == 4


async def test_a_finished_group_that_expires_leaves_no_tensors() -> None:
    bench = Bench(eta=0, batch_size=1, on_stale=OnStale.DROP, steps=5)
    async with bench.controller as controller:
        bench.publish(0)
        batch = await controller.take_batch(0)
        controller.release(batch)
    assert bench.store.statistics().trajectories == 0


async def test_a_cut_group_that_ignores_its_cancellation_changes_nothing() -> None:
    tries = []

    async def episode(engine: InferenceEngine, index: int) -> Trajectory:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            tries.append(index)
        return await generate(engine, index)

    bench = Bench(episode)
    async with bench.controller as controller:
        bench.publish(0)
        await until(lambda: controller.statistics().running == 2)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert sorted(tries) == [0, 1]
    assert bench.store.statistics().puts == 0
    assert bench.controller.statistics().groups["cancelled"] == 2


async def test_stopping_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "_STOP_GRACE", 0.01)
    gate, started = asyncio.Event(), asyncio.Event()

    async def episode(engine: InferenceEngine, index: int) -> None:
        started.set()
        while not gate.is_set():
            try:
                await gate.wait()
            except asyncio.CancelledError:
                continue

    bench = Bench(episode, batch_size=1)
    async with bench.controller:
        bench.publish(0)
        await started.wait()
    assert not gate.is_set()
    gate.set()


async def test_the_last_batch_may_be_smaller_and_then_it_ends() -> None:
    bench = Bench(eta=1, n_prompts=3, epochs=1)
    async with bench.controller as controller:
        bench.publish(0)
        batch = await controller.take_batch(0)
        bench.publish(1)
        controller.release(batch)
        last = await controller.take_batch(1)
        assert prompts(last) == [2]
        controller.release(last)
        with pytest.raises(PromptsExhausted, match="no prompt"):
            await controller.take_batch(2)


async def test_one_trainer_takes_batches() -> None:
    bench = Bench()
    async with bench.controller as controller:
        first = asyncio.create_task(controller.take_batch(0))
        await until(lambda: controller.statistics().batch is not None)
        with pytest.raises(RuntimeError, match="another call"):
            await controller.take_batch(0)
        bench.publish(0)
        assert prompts(await first) == [0, 1]


async def test_a_cancelled_wait_takes_nothing() -> None:
    bench = Bench()
    async with bench.controller as controller:
        waiting = asyncio.create_task(controller.take_batch(0))
        await until(lambda: controller.statistics().batch is not None)
        waiting.cancel()
        await asyncio.wait({waiting})
        bench.publish(0)
        assert prompts(await controller.take_batch(0)) == [0, 1]
