"""Row decisions: pure functions."""

from __future__ import annotations

import random

import pytest

from areal_like.inference.embedded.slots import CacheShape, moves_to_close, plan_prefill, rounded_up


@pytest.mark.parametrize("seed", range(30))
def test_after_the_moves_survivors_occupy_the_first_rows(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 12)
    holes = [row for row in range(count) if rng.random() < 0.5]
    rows: list[int | None] = [None if row in holes else row for row in range(count)]
    survivors = {row for row in rows if row is not None}
    moves = moves_to_close(count, holes)
    for source, target in moves:
        assert rows[source] is not None and rows[target] is None
        rows[target], rows[source] = rows[source], None
    assert set(rows[: len(survivors)]) == survivors
    assert len(moves) <= min(len(holes), len(survivors))


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (2, 2), (3, 4), (5, 8), (9, 10), (10, 10)])
def test_rounding_stops_at_the_limit(count: int, expected: int) -> None:
    assert rounded_up(count, 10) == expected


def test_one_answer_alone_always_fits() -> None:
    shape = CacheShape(max_rows=8, token_bytes=100, max_bytes=1000)
    assert shape.fits(1, 10**6)
    assert shape.fits(2, 5)
    assert not shape.fits(2, 6)
    assert not shape.fits(3, 3)  # three rows are kept as four


def test_every_prompt_is_planned_once() -> None:
    lengths = [5, 900, 3, 64, 500, 7000, 12, 450]
    plan = plan_prefill(lengths)
    assert sorted(i for group in plan for i in group) == list(range(len(lengths)))


def test_short_prompts_share_one_forward_and_long_ones_meet_their_like() -> None:
    assert len(plan_prefill([3, 12, 64, 1, 40])) == 1
    plan = plan_prefill([1000, 5, 950, 400])
    assert [sorted(group) for group in plan] == [[0, 2], [3], [1]]


def test_the_padded_area_is_bounded_unless_one_prompt_is_longer() -> None:
    lengths = [100] * 50 + [60] * 50
    for group in plan_prefill(lengths, area=1000):
        assert len(group) * max(lengths[i] for i in group) <= 1000
    assert plan_prefill([5000], area=1000) == [[0]]
