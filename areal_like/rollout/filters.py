"""What becomes of a finished group: trained on, or filtered."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import TypeAlias

import numpy as np

from areal_like.api.trajectory import Trajectory

#: the user's function: every trajectory of a finished group -> keep it? May be a coroutine function.
AcceptFunction: TypeAlias = Callable[[list[Trajectory]], bool | Awaitable[bool]]


class FilterVerdict(StrEnum):
    KEPT = "kept"
    REJECTED = "rejected"  #: every episode of the group returned None
    EQUAL_REWARDS = "equal_rewards"  #: nothing to learn from: every advantage would be zero
    ACCEPT_FN = "accept_fn"  #: the user's function said no


class GroupFilters:
    """Judges a group when its last episode has ended.

    Args:
        accept_fn: the user's function, or None. What it raises is a fault of the user's code, and propagates.
        drop_equal_rewards: filter groups whose rewards are all equal (DAPO, arXiv 2503.14476, section 3.2).
    """

    def __init__(self, *, accept_fn: AcceptFunction | None = None, drop_equal_rewards: bool = False) -> None:
        self._accept_fn = accept_fn
        self._drop_equal_rewards = drop_equal_rewards

    async def judge(self, trajectories: Sequence[Trajectory]) -> FilterVerdict:
        """The group's fate. ``trajectories`` holds those of all its episodes that returned any."""
        if not trajectories:
            return FilterVerdict.REJECTED
        if self._drop_equal_rewards and _rewards_are_equal(trajectories):
            return FilterVerdict.EQUAL_REWARDS
        if self._accept_fn is not None:
            answer = self._accept_fn(list(trajectories))
            if inspect.isawaitable(answer):
                answer = await answer
            if not answer:
                return FilterVerdict.ACCEPT_FN
        return FilterVerdict.KEPT


def _rewards_are_equal(trajectories: Sequence[Trajectory]) -> bool:
    """True when no token of the group would get an advantage, returns of single turns included."""
    first = trajectories[0].reward
    return all(
        t.reward == first and (t.returns is None or bool(np.all(t.returns[t.loss_mask > 0] == np.float32(first))))
        for t in trajectories
    )
