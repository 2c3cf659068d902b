"""Changes to a row's reward before advantages are taken.

Legend: ``_B`` rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_like.algo.settings import ShapingSettings


def shape_rewards(reward_B: Tensor, length_B: Tensor, group_B: Tensor, settings: ShapingSettings) -> Tensor:
    """clip((reward + length terms + bias) · scaling) of every row, float64 [B].

    Args:
        reward_B: float64 [B]. length_B: written tokens of each row. group_B: int64 [B], index of the row's group.

    Raises:
        ValueError: an option measures against ``settings.length_limit``, which is missing.
    """
    if not settings.changes_rewards:
        return reward_B
    shaped_B = reward_B.to(torch.float64)
    if settings.overlong_margin is not None:
        penalty_B = overlong_penalty(length_B, limit=_limit(settings), margin=settings.overlong_margin)
        shaped_B = shaped_B + settings.overlong_penalty * penalty_B
    if settings.length_reward:
        shaped_B = shaped_B + settings.length_reward * length_reward(reward_B, length_B, group_B)
    shaped_B = (shaped_B + settings.bias) * settings.scaling
    return shaped_B if settings.clip is None else shaped_B.clamp(-settings.clip, settings.clip)


def overlong_penalty(length_B: Tensor, *, limit: int, margin: int) -> Tensor:
    """0 up to ``limit − margin`` written tokens, then falling linearly to −1 at ``limit``, −1 beyond. float64 [B].

    Soft overlong punishment, DAPO (Yu et al. 2025, eq. 13), with L_max = ``limit`` and L_cache = ``margin``.
    """
    if not 0 < margin <= limit:
        raise ValueError(f"overlong penalty: margin must be in (0, limit], got margin {margin} and limit {limit}")
    over_B = (length_B.to(torch.float64) - (limit - margin)) / margin
    return -over_B.clamp(0.0, 1.0)


def within_limit(length_B: Tensor, settings: ShapingSettings) -> Tensor:
    """bool [B], false for rows that :attr:`ShapingSettings.overlong_filter` silences: those at the limit or beyond.

    Overlong filtering, DAPO (Yu et al. 2025, section 3.4): a truncated answer's reward says nothing about its tokens.
    """
    if not settings.overlong_filter:
        return torch.ones_like(length_B, dtype=torch.bool)
    return length_B < _limit(settings)


def length_reward(reward_B: Tensor, length_B: Tensor, group_B: Tensor) -> Tensor:
    """λ = 1/2 − (length − shortest)/(longest − shortest) within the group; min(λ, 0) for rows without reward. [B]

    Length reward, Kimi k1.5 (2025, section 2.3.3), which prefers the shorter of two right answers and never pays for a
    wrong one; right means reward > 0. 0 in groups whose rows are equally long.
    """
    groups = int(group_B.max()) + 1 if group_B.numel() else 0
    length_B = length_B.to(torch.float64)
    low_B, high_B = (
        torch.zeros(groups, dtype=torch.float64).scatter_reduce(0, group_B, length_B, how, include_self=False)[group_B]
        for how in ("amin", "amax")
    )
    lambda_B = 0.5 - (length_B - low_B) / (high_B - low_B).clamp(min=1.0)
    lambda_B = torch.where(reward_B > 0, lambda_B, lambda_B.clamp(max=0.0))
    return torch.where(high_B > low_B, lambda_B, 0.0)


def _limit(settings: ShapingSettings) -> int:
    if settings.length_limit is None:
        raise ValueError("reward shaping: the overlong options need a length_limit; set actor.shaping.length_limit")
    return settings.length_limit
