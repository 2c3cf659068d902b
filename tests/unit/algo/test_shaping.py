from __future__ import annotations

import pytest
import torch

from areal_like.algo.shaping import RewardShaping, overlong_penalty, shape_rewards


def test_bias_scale_and_clip_in_that_order() -> None:
    got = shape_rewards(torch.tensor([-1.0, 0.0, 1.0, 9.0]), RewardShaping(bias=-0.5, scale=10.0, clip=20.0))
    assert got.tolist() == [-15.0, -5.0, 5.0, 20.0]
    assert shape_rewards(torch.tensor([3.5]), RewardShaping()).tolist() == [3.5]


def test_overlong_penalty_is_the_papers_ramp() -> None:
    got = overlong_penalty(torch.tensor([0, 12, 14, 16, 99]), limit=16, margin=4)
    assert got.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]


@pytest.mark.parametrize("margin", [0, 17])
def test_a_margin_outside_the_limit_is_refused(margin: int) -> None:
    with pytest.raises(ValueError, match="margin"):
        overlong_penalty(torch.tensor([1]), limit=16, margin=margin)
