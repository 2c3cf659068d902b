import numpy as np
import pytest

from areal_like.api import Trajectory
from areal_like.rollout.filters import AcceptFunction, FilterVerdict, GroupFilters


def row(reward: float, returns: list[float] | None = None) -> Trajectory:
    return Trajectory(
        token_ids=np.array([1, 2, 3], np.int32),
        loss_mask=np.array([0, 1, 1], np.int32),
        logprobs=np.array([0, -1, -1], np.float32),
        versions=np.array([-1, 0, 0], np.int32),
        reward=reward,
        returns=None if returns is None else np.array(returns, np.float32),
    )


async def test_without_filters_every_group_with_a_trajectory_is_kept() -> None:
    assert await GroupFilters().judge([row(1.0)]) is FilterVerdict.KEPT


async def test_a_group_whose_episodes_were_all_rejected_is_rejected() -> None:
    assert await GroupFilters().judge([]) is FilterVerdict.REJECTED


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([row(1.0), row(1.0)], FilterVerdict.EQUAL_REWARDS),
        ([row(1.0), row(0.0)], FilterVerdict.KEPT),
        ([row(1.0)], FilterVerdict.EQUAL_REWARDS),
        # equal totals, but the turns differ: there is something to learn
        ([row(1.0, [0, 1, 0.5]), row(1.0, [0, 0.5, 1])], FilterVerdict.KEPT),
        # what stands where the policy did not write does not matter
        ([row(1.0, [9, 1, 1]), row(1.0, [7, 1, 1])], FilterVerdict.EQUAL_REWARDS),
        # 0.1 is another number in float32 than in float64
        ([row(0.1, [0, 0.1, 0.1]), row(0.1)], FilterVerdict.EQUAL_REWARDS),
    ],
)
async def test_equal_rewards(rows: list[Trajectory], verdict: FilterVerdict) -> None:
    assert await GroupFilters(drop_equal_rewards=True).judge(rows) is verdict


async def accept_later(rows: list[Trajectory]) -> bool:
    return sum(r.reward for r in rows) > 1


@pytest.mark.parametrize("accept", [lambda rows: sum(r.reward for r in rows) > 1, accept_later])
async def test_the_users_function_may_be_plain_or_a_coroutine(accept: AcceptFunction) -> None:
    filters = GroupFilters(accept_fn=accept)
    assert await filters.judge([row(1.0), row(0.5)]) is FilterVerdict.KEPT
    assert await filters.judge([row(1.0)]) is FilterVerdict.ACCEPT_FN


async def test_what_the_users_function_raises_comes_through() -> None:
    def accept(rows: list[Trajectory]) -> bool:
        raise KeyError("no such field")

    with pytest.raises(KeyError):
        await GroupFilters(accept_fn=accept).judge([row(1.0)])
