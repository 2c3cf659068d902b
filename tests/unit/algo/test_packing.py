from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_like.algo.packing import MAX_PADDING, Layout, cut_minibatches, footprint, pack

LENGTHS = st.lists(st.integers(1, 50), max_size=40)


@given(lengths=LENGTHS, budget=st.integers(1, 120), layout=st.sampled_from(["packed", "padded"]))
def test_every_row_lies_in_one_micro_batch_within_the_budget(lengths: list[int], budget: int, layout: Layout) -> None:
    bins = pack(lengths, budget, layout)
    assert sorted(row for members in bins for row in members) == list(range(len(lengths)))
    for members in bins:
        assert footprint([lengths[i] for i in members], layout) <= budget or len(members) == 1


@given(lengths=LENGTHS, budget=st.integers(50, 120))
def test_packed_bins_are_few(lengths: list[int], budget: int) -> None:
    least = -(-sum(lengths) // budget)
    # any two bins together exceed the budget, else first fit would have joined them
    assert len(pack(lengths, budget)) <= max(2 * least, 1)


def test_by_hand() -> None:
    assert pack([5, 3, 4, 8, 2], 10) == [[3, 4], [0, 2], [1]]
    # padded: 8 alone (8 + 8 > 10); 5 and 4 at width 5; 3 and 2 at width 3
    assert pack([5, 3, 4, 8, 2], 10, "padded") == [[3], [0, 2], [1, 4]]
    assert pack([99, 1], 10) == [[0], [1]]
    assert pack([], 10) == []
    assert footprint([2, 5], "padded") == 10


@given(lengths=st.lists(st.integers(1, 3000), max_size=60))
def test_short_rows_do_not_pay_for_long_ones(lengths: list[int]) -> None:
    for members in pack(lengths, 10**6, "padded"):
        held = [lengths[i] for i in members]
        assert footprint(held, "padded") - sum(held) <= MAX_PADDING


def test_a_long_row_among_short_ones_is_alone() -> None:
    assert pack([4000, *[100] * 8], 10**6, "padded") == [[0], [1, 2, 3, 4, 5, 6, 7, 8]]
    assert pack([8, 3, 5, 7], 10**6, "padded") == [[0, 1, 2, 3]]  # little padding: one pass is cheaper


def test_no_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="budget"):
        pack([1], 0)


@given(
    groups=st.lists(st.integers(0, 12), max_size=60),
    parts=st.integers(1, 8),
    seed=st.one_of(st.none(), st.integers(0, 2**63)),
)
def test_minibatches_hold_whole_groups_in_nearly_equal_numbers(groups: list[int], parts: int, seed: int | None) -> None:
    minibatches = cut_minibatches(groups, parts, seed)
    assert sorted(row for rows in minibatches for row in rows) == list(range(len(groups)))
    held = [{groups[row] for row in rows} for rows in minibatches]
    assert sum(len(h) for h in held) == len(set(groups))
    assert len(minibatches) == min(parts, len(set(groups)))
    if held:
        assert max(map(len, held)) - min(map(len, held)) <= 1


def test_order_and_shuffle() -> None:
    groups = ["a", "b", "a", "c", "d"]
    assert cut_minibatches(groups, 2) == [[0, 1, 2], [3, 4]]
    assert cut_minibatches(groups, 2, seed=3) == cut_minibatches(groups, 2, seed=3)
    many = list(range(20))
    assert cut_minibatches(many, 2, seed=1) != cut_minibatches(many, 2, seed=2)


def test_no_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one minibatch"):
        cut_minibatches(["a"], 0)
