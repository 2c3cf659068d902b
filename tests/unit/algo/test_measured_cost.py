"""The cost of rows from made-up times of micro-batches: found, never negative, and sensible where they say little."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_like.algo.balance import CostModel, plan_micro_batches
from areal_like.algo.measured_cost import Load, MeasuredCost, load_of

COUNTED = CostModel(per_token=2e9, per_token_pair=4e4)

loads_of = st.lists(
    st.builds(Load, tokens=st.integers(1, 20_000), pairs=st.integers(1, 40_000_000)), min_size=1, max_size=12
)


def seconds_of(load: Load, a: float = 3e-5, b: float = 2e-9, c: float = 0.01) -> float:
    return a * load.tokens + b * load.pairs + c


def loads(seed: int) -> list[Load]:
    """Packed micro-batches of 16k tokens, more or less, of short or of long rows."""
    lengths = [[1024] * 16, [8192, 8192], [2048] * (6 + seed), [64] * 256, [4096, 4096, 4096], [300] * (20 + seed)]
    return [load_of(part, "packed") for part in lengths]


def alone(given_loads: list[Load]) -> list[list[Load]]:
    """Rounds of one rank."""
    return [[load] for load in given_loads]


def test_the_load_of_a_micro_batch() -> None:
    assert load_of([3, 5], "packed") == Load(tokens=8, pairs=34)
    assert load_of([3, 5], "padded") == Load(tokens=10, pairs=50)
    assert load_of([], "padded") == load_of([], "packed") == Load(tokens=0, pairs=0)


def test_coefficients_are_found() -> None:
    measured = MeasuredCost(COUNTED)
    for seed in range(3):
        measured.learn(alone(loads(seed)), [seconds_of(load) for load in loads(seed)])
    found = measured.figures()
    assert found["us_per_token"] == pytest.approx(30, rel=0.03)
    assert found["us_per_1k_token_pairs"] == pytest.approx(2.0, rel=0.03)
    assert found["us_per_micro_batch"] == pytest.approx(1e4, rel=0.2)
    assert measured.cost.of(1000) == pytest.approx(1000 * 3e-5 + 1e6 * 2e-9, rel=0.03)


@pytest.mark.parametrize("b", [0.0, 2e-9, 2e-8, 2e-7])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_only_see_the_slowest_of_them_come_to_wait_little(b: float, ranks: int) -> None:
    """Every round takes as long as its heaviest micro-batch, whichever counting took for that one."""
    random = np.random.default_rng(0)

    def rounds_of(lengths: list[int], cost: CostModel) -> list[list[Load]]:
        plan = plan_micro_batches(lengths, ranks=ranks, budget=16_384, cost=cost)
        turns = range(plan.micro_batches)
        return [[load_of([lengths[i] for i in bins[t]], "packed") for bins in plan.ranks] for t in turns]

    def spent(lengths: list[int], cost: CostModel) -> float:
        """By the rank with most to do."""
        rounds = rounds_of(lengths, cost)
        return max(sum(seconds_of(loads[rank], b=b) for loads in rounds) for rank in range(ranks))

    measured = MeasuredCost(COUNTED)
    for _ in range(5):
        lengths = np.exp(random.normal(6.5, 1.0, 96)).clip(32, 8192).astype(int).tolist()
        rounds = rounds_of(lengths, measured.cost)
        measured.learn(rounds, [max(seconds_of(load, b=b) for load in loads) for loads in rounds])
    best = spent(lengths, CostModel(per_token=3e-5, per_token_pair=b))
    assert spent(lengths, measured.cost) <= 1.02 * best
    assert measured.cost.of(4096) == pytest.approx(4096 * 3e-5 + 4096**2 * b, rel=0.1)


def test_the_first_update_and_stalls_count_for_nothing() -> None:
    measured = MeasuredCost(COUNTED)
    measured.learn(alone(loads(0)), [17.0] * len(loads(0)))
    assert measured.cost == COUNTED and measured.figures() == {}
    clean = MeasuredCost(COUNTED)
    for each in (measured, clean):
        for seed in range(2):
            each.learn(alone(loads(seed)), [seconds_of(load) for load in loads(seed)])
    stalled = [seconds_of(load) for load in loads(2)]
    stalled[2] += 30.0
    measured.learn(alone(loads(2)), stalled)
    for name, value in clean.figures().items():
        assert measured.figures()[name] == pytest.approx(value, rel=0.05)


def test_what_readings_cannot_tell_apart_keeps_counted_proportions() -> None:
    same = [load_of([2048] * 8, "packed")] * 4
    measured = MeasuredCost(COUNTED)
    for _ in range(3):
        measured.learn(alone(same), [0.5] * 4)
    cost = measured.cost
    assert cost.per_token_pair / cost.per_token == pytest.approx(COUNTED.per_token_pair / COUNTED.per_token, rel=0.2)


@given(st.lists(st.tuples(loads_of, st.floats(1e-6, 1e3)), min_size=1, max_size=4))
def test_coefficients_are_never_negative_and_rows_always_cost_something(
    updates: list[tuple[list[Load], float]],
) -> None:
    measured = MeasuredCost(COUNTED)
    for number, (given_loads, scale) in enumerate(updates):
        measured.learn(alone(given_loads), [scale * (1 + (i * 7 + number) % 5) for i in range(len(given_loads))])
        assert all(value >= 0 for value in measured.figures().values())
        assert measured.cost.of(100) > 0


def test_an_update_without_rows_changes_nothing() -> None:
    measured = MeasuredCost(COUNTED)
    for _ in range(3):
        measured.learn([[Load(tokens=0, pairs=0)]], [0.0])
    assert measured.cost == COUNTED


def test_rows_are_spread_by_what_was_measured() -> None:
    """Where attention is slow, one long row costs as much as many short ones, and stands alone."""
    lengths = [8192, *[512] * 80]

    def waiting(cost: CostModel) -> float:
        plan = plan_micro_batches(lengths, ranks=2, budget=100_000, cost=cost)
        taken = [
            sum(seconds_of(load_of([lengths[i] for i in members], "packed"), b=2e-8) for members in bins)
            for bins in plan.ranks
        ]
        return max(taken) - min(taken)

    measured = MeasuredCost(COUNTED)
    for seed in range(3):
        measured.learn(alone(loads(seed)), [seconds_of(load, b=2e-8) for load in loads(seed)])
    assert waiting(measured.cost) < 0.05 < waiting(COUNTED)
