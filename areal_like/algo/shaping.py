"""Changes to a row's reward before advantages are taken.

Legend: ``_B`` rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardShaping:
    """Attributes:
    bias, scale: reward becomes (reward + bias) · scale.
    clip: then bounded to ±clip; None: not bounded.
    """

    bias: float = 0.0
    scale: float = 1.0
    clip: float | None = None


def shape_rewards(reward_B: Tensor, shaping: RewardShaping) -> Tensor:
    """clip((reward + bias) · scale) [B]."""
    shaped_B = (reward_B + shaping.bias) * shaping.scale
    return shaped_B if shaping.clip is None else shaped_B.clamp(-shaping.clip, shaping.clip)


def overlong_penalty(length_B: Tensor, *, limit: int, margin: int) -> Tensor:
    """0 up to ``limit − margin`` written tokens, then falling linearly to −1 at ``limit``, −1 beyond. float64 [B].

    Soft overlong punishment, DAPO (Yu et al. 2025, eq. 13), with L_max = ``limit`` and L_cache = ``margin``.
    """
    if not 0 < margin <= limit:
        raise ValueError(f"overlong penalty: margin must be in (0, limit], got margin {margin} and limit {limit}")
    over_B = (length_B.to(torch.float64) - (limit - margin)) / margin
    return -over_B.clamp(0.0, 1.0)
