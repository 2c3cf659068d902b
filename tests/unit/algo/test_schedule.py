from __future__ import annotations

import math

import pytest

from areal_like.algo.schedule import LearningRate


def test_constant_with_warm_up() -> None:
    rate = LearningRate(peak=2.0, warmup_steps=4, total_steps=10)
    assert [rate.at(i) for i in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_linear_ends_at_the_ratio_with_the_last_step() -> None:
    rate = LearningRate(peak=1.0, kind="linear", warmup_steps=1, total_steps=6, min_ratio=0.2)
    assert [rate.at(i) for i in range(7)] == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_is_halfway_in_the_middle() -> None:
    rate = LearningRate(peak=3.0, kind="cosine", total_steps=11, min_ratio=0.1)
    assert rate.at(0) == 3.0
    assert rate.at(5) == pytest.approx(3.0 * 0.55)
    assert rate.at(2) == pytest.approx(3.0 * (0.1 + 0.9 * (1 + math.cos(0.2 * math.pi)) / 2))
    assert rate.at(10) == pytest.approx(0.3)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (5, 3), (3, 3), (0, 2)])
def test_short_runs_are_well_defined(kind: str, warmup: int, total: int) -> None:
    rate = LearningRate(peak=1.0, kind=kind, warmup_steps=warmup, total_steps=total)  # type: ignore[arg-type]
    assert all(0.0 <= rate.at(i) <= 1.0 for i in range(8))


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        LearningRate(peak=1.0).at(-1)
