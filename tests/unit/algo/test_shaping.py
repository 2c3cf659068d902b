"""Reward shaping against values worked out by hand, from the papers' formulas."""

from __future__ import annotations

import pytest
import torch

from areal_like.algo.settings import ShapingSettings, shaping_settings
from areal_like.algo.shaping import length_reward, overlong_penalty, shape_rewards, within_limit
from areal_like.config.shaping import ShapingConfig

LENGTHS = torch.tensor([2, 12, 14, 16])
GROUPS = torch.tensor([0, 0, 1, 1])


def shaped(rewards: list[float], settings: ShapingSettings) -> list[float]:
    found: list[float] = shape_rewards(torch.tensor(rewards, dtype=torch.float64), LENGTHS, GROUPS, settings).tolist()
    return found


def test_bias_scaling_and_clip_in_that_order() -> None:
    assert shaped([-1, 0, 1, 9], ShapingSettings(bias=-0.5, scaling=10.0, clip=20.0)) == [-15.0, -5.0, 5.0, 20.0]


def test_without_settings_rewards_are_the_same_numbers() -> None:
    assert shaped([3.5, 0.1, -2, 7], ShapingSettings()) == [3.5, 0.1, -2.0, 7.0]
    assert shaping_settings(ShapingConfig(), 16) == ShapingSettings(length_limit=16)


def test_overlong_penalty_is_the_papers_ramp() -> None:
    got = overlong_penalty(torch.tensor([0, 12, 14, 16, 99]), limit=16, margin=4)
    assert got.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_the_penalty_comes_before_scaling() -> None:
    settings = ShapingSettings(length_limit=16, overlong_margin=4, overlong_penalty=0.5, scaling=2.0)
    assert shaped([1, 1, 1, 0], settings) == [2.0, 2.0, 1.5, -1.0]


@pytest.mark.parametrize("margin", [0, 17])
def test_a_margin_outside_the_limit_is_refused(margin: int) -> None:
    with pytest.raises(ValueError, match="margin"):
        overlong_penalty(torch.tensor([1]), limit=16, margin=margin)


def test_the_filter_silences_rows_at_the_limit() -> None:
    assert within_limit(LENGTHS, ShapingSettings(length_limit=14, overlong_filter=True)).tolist() == [1, 1, 0, 0]
    assert within_limit(LENGTHS, ShapingSettings(length_limit=2)).all()
    with pytest.raises(ValueError, match="need a length_limit"):
        within_limit(LENGTHS, ShapingSettings(overlong_filter=True))


def test_kimis_length_reward_by_hand() -> None:
    lengths = torch.tensor([10, 20, 15, 7, 7, 5])
    groups = torch.tensor([0, 0, 0, 1, 1, 2])
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    # lambda: 0.5, -0.5, 0.0 in the first group; equally long rows and a row alone get nothing
    assert length_reward(rewards, lengths, groups).tolist() == [0.5, -0.5, 0.0, 0.0, 0.0, 0.0]
    wrong = torch.zeros(6, dtype=torch.float64)
    assert length_reward(wrong, lengths, groups).tolist() == [0.0, -0.5, 0.0, 0.0, 0.0, 0.0]
    got = shape_rewards(rewards, lengths, groups, ShapingSettings(length_reward=0.2))
    assert got.tolist() == pytest.approx([1.1, 0.9, 0.0, 1.0, 0.0, 1.0])


def test_nothing_is_shaped_where_there_is_nothing() -> None:
    empty = torch.zeros(0, dtype=torch.float64)
    assert shape_rewards(empty, empty.long(), empty.long(), ShapingSettings(length_reward=1.0)).shape == (0,)
