from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_like.algo.balance import CostModel, karmarkar_karp, plan_micro_batches
from areal_like.algo.packing import Layout, footprint


@given(costs=st.lists(st.floats(0.0, 1e6), max_size=40), parts=st.integers(1, 8))
def test_partition_is_complete_and_no_worse_than_one_row_over_the_mean(costs: list[float], parts: int) -> None:
    shares = karmarkar_karp(costs, parts)
    assert len(shares) == parts
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    if costs:
        heaviest = max(sum(costs[i] for i in share) for share in shares)
        assert heaviest <= sum(costs) / parts + max(costs) + 1e-6


def test_the_classic_example() -> None:
    # Karmarkar and Karp 1982: {8,7,6,5,4} differ by 2 under differencing
    totals = sorted(sum([8, 7, 6, 5, 4][i] for i in share) for share in karmarkar_karp([8, 7, 6, 5, 4], 2))
    assert totals == [14, 16]


@pytest.mark.parametrize("parts", [2, 3])
def test_close_to_the_best_partition(parts: int) -> None:
    costs = [13.0, 11.0, 9.0, 8.0, 7.0, 5.0, 4.0, 2.0]
    best = min(
        max(sum(c for c, p in zip(costs, assignment, strict=True) if p == part) for part in range(parts))
        for assignment in itertools.product(range(parts), repeat=len(costs))
    )
    got = max(sum(costs[i] for i in share) for share in karmarkar_karp(costs, parts))
    assert got <= 1.1 * best


@given(
    lengths=st.lists(st.integers(1, 60), max_size=40),
    ranks=st.integers(1, 6),
    budget=st.integers(1, 100),
    layout=st.sampled_from(["packed", "padded"]),
    pair=st.sampled_from([0.0, 0.1]),
)
def test_every_rank_runs_as_many_micro_batches(
    lengths: list[int], ranks: int, budget: int, layout: Layout, pair: float
) -> None:
    plan = plan_micro_batches(lengths, ranks=ranks, budget=budget, layout=layout, cost=CostModel(per_token_pair=pair))
    assert len(plan.ranks) == ranks
    assert {len(bins) for bins in plan.ranks} == {plan.micro_batches}
    assert plan.micro_batches >= 1
    rows = [row for bins in plan.ranks for members in bins for row in members]
    assert sorted(rows) == list(range(len(lengths)))
    for members in itertools.chain.from_iterable(plan.ranks):
        assert footprint([lengths[i] for i in members], layout) <= budget or len(members) == 1


def test_ranks_without_rows_run_empty_micro_batches() -> None:
    plan = plan_micro_batches([7, 3], ranks=3, budget=5)
    assert sorted(plan.ranks) == [((),), ((0,),), ((1,),)]


def test_fewer_micro_batches_are_divided_before_empty_ones_are_added() -> None:
    # one row of 90 on one rank needs a micro-batch of its own beside others; the other rank could do with fewer
    plan = plan_micro_batches([50, 50, 20, 20, 20, 20, 20], ranks=2, budget=60)
    assert all(members for bins in plan.ranks for members in bins)


def test_costs_not_rows_are_balanced() -> None:
    lengths = [100, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10]
    plan = plan_micro_batches(lengths, ranks=2, budget=1000)
    loads = [sum(lengths[i] for members in bins for i in members) for bins in plan.ranks]
    assert loads == [100, 100]


def test_the_plan_is_a_pure_function() -> None:
    lengths = [5, 5, 5, 3, 3, 9, 1]
    assert plan_micro_batches(lengths, ranks=2, budget=9) == plan_micro_batches(lengths, ranks=2, budget=9)


def test_no_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one part"):
        karmarkar_karp([1.0], 0)
