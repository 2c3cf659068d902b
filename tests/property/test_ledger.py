"""The staleness contract on the real lifecycle, admission and batch rule, over simulated runs.

A run is a discrete-event simulation: groups take heavy-tailed times, fail, are filtered and re-admitted; publications
fail and leave the acknowledged version where it was; batches lose groups after they were taken. After every event the
lemma of docs/staleness.md is checked by counting stamps, independently of how the rules compute it.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.api.trajectory import GroupTag, PromptId, TrajectoryTag
from areal_like.rollout import batch_rule
from areal_like.rollout.admission import AdmissionVerdict, StalenessLimits
from areal_like.rollout.batch_rule import BatchDecision, BatchFacts, BatchVerdict, OnStale
from areal_like.rollout.cursor import PromptCursor, PromptVisit
from areal_like.rollout.ledger import BatchRule, GroupLedger, StalenessBroken
from areal_like.rollout.lifecycle import GroupState

EXPIRY_RETRIES = 2


@dataclass(frozen=True, kw_only=True)
class World:
    """What may happen in a run. Rates are probabilities; ``tail`` is the Pareto exponent of episode times."""

    seed: int
    batch_size: int = 4
    eta: int = 2
    steps: int = 12
    max_concurrent: int = 64
    on_stale: OnStale = OnStale.WAIT
    n_prompts: int = 1000
    epochs: int | None = None
    tail: float = 1.0
    fail: float = 0.1
    filtered: float = 0.1
    publish_fails: float = 0.2
    lost: float = 0.1
    update_time: float = 1.0
    setup_time: float = 0.5


WORLDS = st.builds(
    World,
    seed=st.integers(0, 2**32),
    batch_size=st.integers(1, 6),
    eta=st.integers(0, 4),
    steps=st.integers(1, 14),
    max_concurrent=st.integers(1, 40),
    n_prompts=st.integers(1, 40),
    epochs=st.one_of(st.none(), st.integers(1, 6)),
    tail=st.sampled_from([0.4, 1.0, 3.0]),
    fail=st.sampled_from([0.0, 0.1, 0.4]),
    filtered=st.sampled_from([0.0, 0.1, 0.4]),
    publish_fails=st.sampled_from([0.0, 0.2, 0.8]),
    lost=st.sampled_from([0.0, 0.2]),
    update_time=st.sampled_from([0.01, 1.0, 10.0]),
    setup_time=st.sampled_from([0.0, 0.5, 20.0]),
)


class Run:
    """One simulated run. ``lags`` holds the lag of every group taken, ``ends`` every final exit of every prompt."""

    def __init__(self, world: World, rule: BatchRule = batch_rule.decide) -> None:
        self.world = world
        self.random = random.Random(world.seed)
        limits = StalenessLimits(
            batch_size=world.batch_size,
            max_head_offpolicyness=world.eta,
            total_train_steps=world.steps,
            max_concurrent_rollouts=world.max_concurrent,
        )
        self.ledger = GroupLedger(limits, world.on_stale, rule=rule)
        self.cursor = PromptCursor(n_prompts=world.n_prompts, seed=world.seed, epochs=world.epochs)
        self.visits: dict[str, PromptVisit] = {}
        self.stamps: dict[str, int] = {}
        self.lags: list[int] = []
        self.ends: dict[PromptId, list[GroupState]] = {}
        self.handed_out: set[PromptId] = set()
        self.taken: tuple[GroupTag, ...] = ()
        self.version = 0
        self.acknowledged = 0
        self.training = False
        self.exhausted = False
        self._events: list[tuple[float, int, str, str]] = []
        self._order = itertools.count()
        self._now = 0.0

    def play(self) -> None:
        self.ledger.acknowledge(0)
        self.settle()
        while self.version < self.world.steps and not self.exhausted:
            assert self._events, f"deadlock at version {self.version}: {self.ledger.statistics()}"
            self._now, _, event, group_id = heapq.heappop(self._events)
            getattr(self, event)(group_id)
            self.settle()

    def settle(self) -> None:
        """Do everything that is allowed now, checking the invariants after each move."""
        while self.ledger.admission(prompts_left=not self.cursor.exhausted) is AdmissionVerdict.ADMIT:
            visit = self.cursor.advance()
            self.handed_out.add(visit.prompt)
            self.visits[visit.group_id] = visit
            self.ledger.admit(visit.group_id)
            self.later(self.world.setup_time * self.random.random(), "dispatch", visit.group_id)
            self.check()
        if not self.training and self.version < self.world.steps:
            decision = self.ledger.batch_decision(self.version, prompts_left=not self.cursor.exhausted)
            self.exhausted = decision.verdict is BatchVerdict.EXHAUSTED
            if decision.verdict is BatchVerdict.TAKE:
                self.take(decision)
                self.settle()

    def take(self, decision: BatchDecision) -> None:
        running = self.ledger.statistics().counters.running
        self.taken = self.ledger.take(decision)
        full = len(self.taken) == self.world.batch_size
        assert full or (self.cursor.exhausted and not running), "only the last batch may be smaller"
        for group in self.taken:
            self.lags.append(self.version - group.oldest_version)
            del self.stamps[group.group_id]
        for group_id in reversed(self.ledger.overdue(self.version)):
            visit = self.visits[group_id]
            self.stamps.pop(group_id, None)
            if visit.expired < EXPIRY_RETRIES:
                self.ledger.end(group_id, GroupState.CANCELLED)
                self.cursor.give_back(visit, expired=True)
            else:
                self.finish_prompt(group_id, GroupState.STALE)
        self.training = True
        self.later(self.world.update_time * self.random.random(), "updated")
        self.check()

    def updated(self, _: str) -> None:
        """The trainer made a version; unless its publication fails, the servers acknowledge it."""
        self.version += 1
        may_fail = self.version - self.acknowledged <= self.world.eta
        if not (may_fail and self.random.random() < self.world.publish_fails):
            self.acknowledged = self.version
            self.ledger.acknowledge(self.version)
        lost = {g.group_id for g in self.taken if self.random.random() < self.world.lost}
        assert set(self.ledger.release(g.group_id for g in self.taken if g.group_id not in lost)) == lost
        for group in self.taken:
            state = GroupState.FAILED if group.group_id in lost else GroupState.TRAINED
            self.ends.setdefault(group.prompt, []).append(state)
        self.training = False
        self.check()

    def dispatch(self, group_id: str) -> None:
        if self.ledger.is_live(group_id):
            self.stamps[group_id] = self.ledger.dispatch(group_id)
            assert self.stamps[group_id] == self.acknowledged
            self.later(self.random.paretovariate(self.world.tail), "episodes_ended", group_id)
            self.check()

    def episodes_ended(self, group_id: str) -> None:
        if not self.ledger.is_live(group_id):
            return
        draw = self.random.random()
        if draw < self.world.fail:
            self.finish_prompt(group_id, GroupState.FAILED)
        elif draw < self.world.fail + self.world.filtered:
            self.finish_prompt(group_id, GroupState.FILTERED)
        else:
            oldest = self.stamps[group_id]
            if self.random.random() < 0.3:  # all its tokens may be newer than they had to be
                oldest = self.random.randint(oldest, self.acknowledged)
            tag = self.ledger.finish(_tag(self.visits[group_id], self.stamps[group_id], oldest))
            self.stamps[group_id] = tag.stamp
        self.check()

    def finish_prompt(self, group_id: str, state: GroupState) -> None:
        self.ledger.end(group_id, state)
        self.stamps.pop(group_id, None)
        self.ends.setdefault(self.visits[group_id].prompt, []).append(state)

    def check(self) -> None:
        """Counters balance, and the lemma holds: at most (h + eta + 1 - t) * B live groups are stamped <= h."""
        statistics = self.ledger.statistics()
        assert statistics.counters.balanced
        assert statistics.live_stamps == Counter(self.stamps.values())
        assert statistics.counters.running <= self.world.max_concurrent
        t = statistics.batches_taken
        assert t + -(-statistics.counters.live // self.world.batch_size) <= self.world.steps
        if self.world.on_stale is OnStale.WAIT:
            for h in range(t - self.world.eta - 1, self.acknowledged + 1):
                older = sum(stamp <= h for stamp in self.stamps.values())
                assert older <= max(h + self.world.eta + 1 - t, 0) * self.world.batch_size

    def later(self, delay: float, event: str, group_id: str = "") -> None:
        heapq.heappush(self._events, (self._now + delay, next(self._order), event, group_id))


def _tag(visit: PromptVisit, stamp: int, oldest: int) -> GroupTag:
    trajectory = TrajectoryTag(
        key=visit.group_id,
        group_id=visit.group_id,
        episode_id="",
        length=2,
        loss_tokens=1,
        reward=0.0,
        oldest_version=oldest,
        newest_version=oldest,
    )
    return GroupTag(
        group_id=visit.group_id, prompt=visit.prompt, attempt=visit.attempt, stamp=stamp, trajectories=(trajectory,)
    )


@given(WORLDS, st.sampled_from([OnStale.WAIT, OnStale.DROP]))
@settings(max_examples=400, deadline=None)
def test_no_group_is_older_than_eta_and_nothing_stalls(world: World, on_stale: OnStale) -> None:
    run = Run(World(**{**vars(world), "on_stale": on_stale}))
    run.play()
    assert all(0 <= lag <= world.eta for lag in run.lags)
    assert run.exhausted or run.version == world.steps
    ended = [states for prompt, states in run.ends.items()]
    assert all(len(states) == 1 for states in ended), "each (epoch, prompt) ends exactly once"
    if run.exhausted:
        assert set(run.ends) == run.handed_out
        assert world.epochs is not None
        assert len(run.ends) == world.epochs * world.n_prompts


@given(WORLDS)
@settings(max_examples=50, deadline=None)
def test_eta_zero_is_synchronous(world: World) -> None:
    run = Run(World(**{**vars(world), "eta": 0}))
    run.play()
    assert set(run.lags) <= {0}


@given(WORLDS)
@settings(max_examples=50, deadline=None)
def test_waiting_drops_nothing_for_being_slow(world: World) -> None:
    run = Run(world)
    run.play()
    exits = run.ledger.statistics().counters.exits
    assert exits[GroupState.STALE] == 0
    assert exits[GroupState.CANCELLED] == 0


@given(WORLDS)
@settings(max_examples=50, deadline=None)
def test_admission_alone_never_stalls(world: World) -> None:
    run = Run(World(**{**vars(world), "on_stale": OnStale.TRAIN}))
    run.play()
    assert run.exhausted or run.version == world.steps


def _first_come_first_served(limits: StalenessLimits, on_stale: OnStale, facts: BatchFacts) -> BatchDecision:
    """A wrong rule: whatever has finished is taken, and slow groups are left behind."""
    return batch_rule.decide(limits, OnStale.TRAIN, facts)


def _one_too_many(limits: StalenessLimits, on_stale: OnStale, facts: BatchFacts) -> BatchDecision:
    """A wrong rule: the deadline is off by one version."""
    later = StalenessLimits(
        batch_size=limits.batch_size,
        max_head_offpolicyness=limits.max_head_offpolicyness + 1,
        total_train_steps=limits.total_train_steps,
        max_concurrent_rollouts=limits.max_concurrent_rollouts,
    )
    return batch_rule.decide(later, on_stale, facts)


def _newest_first(limits: StalenessLimits, on_stale: OnStale, facts: BatchFacts) -> BatchDecision:
    """A wrong rule: it takes the newest stamps."""
    decision = batch_rule.decide(limits, OnStale.TRAIN, facts)
    wanted, chosen = sum(decision.chosen.values()), {}
    for stamp in sorted(facts.finished, reverse=True):
        chosen[stamp] = min(wanted, facts.finished[stamp])
        wanted -= chosen[stamp]
    return BatchDecision(verdict=decision.verdict, chosen={s: n for s, n in chosen.items() if n})


@pytest.mark.parametrize("wrong", [_first_come_first_served, _one_too_many, _newest_first])
def test_the_simulation_catches_a_wrong_batch_rule(wrong: BatchRule) -> None:
    """With the real rule these worlds pass; the lemma's check and the bound itself both fail with a wrong one."""
    worlds = [World(seed=seed, tail=0.5, publish_fails=0.0) for seed in range(40)]
    for world in worlds:
        Run(world).play()
    assert sum(_violates(Run(world, wrong)) for world in worlds) > len(worlds) // 2

    def unchecked(world: World) -> Run:
        run = Run(world, wrong)
        run.check = lambda: None  # type: ignore[method-assign]
        return run

    with pytest.raises(StalenessBroken):
        for world in worlds:
            unchecked(world).play()


@pytest.mark.parametrize("eta", [1, 2, 3])
def test_the_bound_is_tight(eta: int) -> None:
    """Lags reach eta, so that a bound of eta - 1 would be seen to fail; the contract does not hold by idleness."""
    lags: list[int] = []
    for seed in range(40):
        run = Run(World(seed=seed, eta=eta, publish_fails=0.0))
        run.play()
        lags += run.lags
    assert max(lags) == eta


def _violates(run: Run) -> bool:
    try:
        run.play()
    except (AssertionError, StalenessBroken):
        return True
    return False
