"""The real controller, executor and cursor on virtual time, against servers that die and publications that fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_like.api import InferenceEngine, ModelRequest, ModelResponse, RolloutWorkflow, StopReason, Trajectory
from areal_like.api.trajectory import Batch, PromptId
from areal_like.errors import RolloutsEnded, ServerUnavailable
from areal_like.rollout import batch_rule
from areal_like.rollout.admission import StalenessLimits
from areal_like.rollout.batch_rule import BatchDecision, BatchFacts, OnStale
from areal_like.rollout.breaker import Breaker
from areal_like.rollout.controller import RolloutController
from areal_like.rollout.convert import to_trajectories
from areal_like.rollout.cursor import PromptCursor
from areal_like.rollout.executor import ExecutorSettings, GroupExecutor
from areal_like.rollout.filters import GroupFilters
from areal_like.rollout.ledger import BatchRule, GroupLedger, StalenessBroken
from areal_like.rollout.lifecycle import GroupState
from areal_like.rollout.statistics import GroupExit
from areal_like.rollout.store import TrajectoryStore

RunVirtual = Callable[[Coroutine[Any, Any, Any]], Any]


@dataclass(frozen=True, kw_only=True)
class World:
    seed: int
    batch_size: int
    eta: int
    steps: int
    max_concurrent: int
    on_stale: OnStale
    n_prompts: int
    epochs: int | None
    siblings: int
    tail: float
    episode_fails: float
    rejected: float
    server_fails: float
    publish_fails: float
    lost: float
    update_time: float


WORLDS = st.builds(
    World,
    seed=st.integers(0, 2**32),
    batch_size=st.integers(1, 4),
    eta=st.integers(0, 3),
    steps=st.integers(1, 8),
    max_concurrent=st.integers(1, 20),
    on_stale=st.sampled_from([OnStale.WAIT, OnStale.DROP]),
    n_prompts=st.integers(1, 20),
    epochs=st.one_of(st.none(), st.integers(1, 4)),
    siblings=st.integers(1, 3),
    tail=st.sampled_from([0.4, 1.0, 3.0]),
    episode_fails=st.sampled_from([0.0, 0.1, 0.5]),
    rejected=st.sampled_from([0.0, 0.3]),
    server_fails=st.sampled_from([0.0, 0.2]),
    publish_fails=st.sampled_from([0.0, 0.3]),
    lost=st.sampled_from([0.0, 0.2]),
    update_time=st.sampled_from([0.01, 1.0, 10.0]),
)


class Servers:
    """Three servers whose versions advance one after the other, and which drop requests."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self.world = world
        self.chance = chance
        self.versions = dict.fromkeys("abc", 0)
        self.rotation = set(self.versions)

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Two segments of two tokens, each under the version the server has when it is written."""
        name = self.chance.choice(sorted(self.rotation))
        versions = []
        for _ in range(2):
            await asyncio.sleep(0.5 * self.chance.paretovariate(self.world.tail))
            if name not in self.rotation or self.chance.random() < self.world.server_fails:
                raise ServerUnavailable(f"server {name} is gone")
            versions += [self.versions[name]] * 2
        return ModelResponse(
            input_tokens=list(request.input_ids),
            output_tokens=[7] * 4,
            output_logprobs=[-1.0] * 4,
            output_versions=versions,
            stop_reason=StopReason.STOP,
        )

    def get_version(self) -> int:
        return min(self.versions[name] for name in self.rotation)

    async def publish(self, version: int) -> None:
        """Servers that miss this version leave the rotation; the others bring back those that missed an older one."""
        missed = {name for name in sorted(self.versions) if self.chance.random() < self.world.publish_fails}
        missed.discard("a")  # one always makes it
        for name in sorted(set(self.versions) - missed):
            await asyncio.sleep(self.chance.random())
            self.versions[name] = version
        self.rotation = set(self.versions) - missed


class Task(RolloutWorkflow):
    def __init__(self, world: World, chance: random.Random) -> None:
        self.world = world
        self.chance = chance

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory | None:
        await asyncio.sleep(self.chance.random())
        answer = await engine.agenerate(ModelRequest(input_ids=[data["token"]]))
        draw = self.chance.random()
        if draw < self.world.episode_fails:
            raise ValueError("the environment broke")
        if draw < self.world.episode_fails + self.world.rejected:
            return None
        return Trajectory(
            token_ids=np.array([data["token"], *answer.output_tokens]),
            loss_mask=np.array([0, 1, 1, 1, 1]),
            logprobs=np.array([0.0, *answer.output_logprobs], np.float32),
            versions=np.array([-1, *answer.output_versions]),
            reward=float(draw),
        )


@dataclass
class Outcome:
    world: World
    batches: list[Batch] = field(default_factory=list)
    exits: list[GroupExit] = field(default_factory=list)
    ended_early: bool = False

    @property
    def lags(self) -> list[int]:
        return [lag for batch in self.batches for lag in batch.lags]


async def play(world: World, rule: BatchRule = batch_rule.decide) -> Outcome:
    chance, outcome, store = random.Random(world.seed), Outcome(world), TrajectoryStore()
    servers = Servers(world, chance)
    executor = GroupExecutor(
        workflow=Task(world, chance),
        engine=servers,
        convert=to_trajectories,
        sink=store,
        filters=GroupFilters(accept_fn=lambda rows: sum(row.reward for row in rows) > 0.2),
        settings=ExecutorSettings(seed=1, n_samples=world.siblings, episode_timeout=50.0, episode_retries=1),
        breaker=Breaker(limit=10_000),
    )
    controller = RolloutController(
        ledger=GroupLedger(
            StalenessLimits(
                batch_size=world.batch_size,
                max_head_offpolicyness=world.eta,
                total_train_steps=world.steps,
                max_concurrent_rollouts=world.max_concurrent,
            ),
            world.on_stale,
            rule=rule,
        ),
        executor=executor,
        cursor=PromptCursor(n_prompts=world.n_prompts, seed=world.seed, epochs=world.epochs),
        rows=[{"token": index + 1} for index in range(world.n_prompts)],
        on_exit=outcome.exits.append,
    )
    async with controller:
        controller.acknowledged(0)
        try:
            await train(world, controller, servers, store, outcome)
        except RolloutsEnded:
            outcome.ended_early = True
    check_end(controller, store)
    return outcome


async def train(
    world: World, controller: RolloutController, servers: Servers, store: TrajectoryStore, outcome: Outcome
) -> None:
    for version in range(world.steps):
        batch = await controller.take_batch(version)
        outcome.batches.append(batch)
        assert len(store.get([t.key for t in batch.trajectories])) == len(batch.trajectories)
        statistics = controller.statistics()
        assert statistics.admitted == statistics.live + statistics.taken + sum(statistics.groups.values())
        await asyncio.sleep(world.update_time * servers.chance.random())
        kept = tuple(group for group in batch.groups if servers.chance.random() >= world.lost)
        await servers.publish(version + 1)
        controller.acknowledged(servers.get_version())
        controller.release(Batch(version=version, groups=kept))


def check_end(controller: RolloutController, store: TrajectoryStore) -> None:
    statistics = controller.statistics()
    assert (statistics.live, statistics.taken) == (0, 0)
    assert statistics.admitted == sum(statistics.groups.values())
    assert store.statistics().trajectories == 0, "every way out deletes the group's tensors"


@given(world=WORLDS)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_run_keeps_the_bound_and_comes_to_its_end(run_virtual: RunVirtual, world: World) -> None:
    outcome = run_virtual(play(world))
    assert all(0 <= lag <= world.eta for lag in outcome.lags)
    assert outcome.ended_early or len(outcome.batches) == world.steps
    final: dict[PromptId, int] = {}
    for exit_ in outcome.exits:
        if exit_.state is not GroupState.CANCELLED:
            final[exit_.visit.prompt] = final.get(exit_.visit.prompt, 0) + 1
    assert set(final.values()) <= {1}, "each (epoch, prompt) ends exactly once"
    if outcome.ended_early:
        assert world.epochs is not None
        assert len(final) == world.epochs * world.n_prompts
    if world.on_stale is OnStale.WAIT:
        assert all(e.reason == "stopped" for e in outcome.exits if e.state is GroupState.CANCELLED)


@given(world=WORLDS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_run_is_a_pure_function_of_its_seed(run_virtual: RunVirtual, world: World) -> None:
    assert run_virtual(play(world)).batches == run_virtual(play(world)).batches


def test_a_wrong_batch_rule_is_caught(run_virtual: RunVirtual) -> None:
    """Taking whatever has finished leaves slow groups behind; with the real rule the same worlds are fine."""

    def first_come(limits: StalenessLimits, on_stale: OnStale, facts: BatchFacts) -> BatchDecision:
        return batch_rule.decide(limits, OnStale.TRAIN, facts)

    world = World(
        seed=3,
        batch_size=4,
        eta=2,
        steps=8,
        max_concurrent=20,
        on_stale=OnStale.WAIT,
        n_prompts=50,
        epochs=None,
        siblings=2,
        tail=0.5,
        episode_fails=0.1,
        rejected=0.1,
        server_fails=0.05,
        publish_fails=0.2,
        lost=0.1,
        update_time=1.0,
    )
    assert max(run_virtual(play(world)).lags) == 2
    with pytest.raises(StalenessBroken):
        run_virtual(play(world, first_come))


def test_the_virtual_loop_sees_a_deadlock(run_virtual: RunVirtual, deadlock: type[Exception]) -> None:
    """Without this, the tests above would only hang."""
    with pytest.raises(deadlock):
        run_virtual(asyncio.Event().wait())
