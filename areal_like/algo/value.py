"""The critic's loss.

Legend: ``_T`` written target tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_like.algo.terms import unmasked


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """``loss_T`` float [T], 0 where masked, carries the gradient; ``clipped_T`` bool [T], where the clip took it."""

    loss_T: Tensor
    clipped_T: Tensor


def value_loss(
    value_T: Tensor, old_T: Tensor, return_T: Tensor, mask_T: Tensor, *, clip: float | None = None
) -> ValueLoss:
    """½ (V − R)²; with ``clip`` ½ max((V − R)², (V_old + clip(V − V_old, ±clip) − R)²).

    PPO's clipped value loss (Schulman et al. 2017, reference code; Huang et al. 2022, "37 details", no. 9): a value
    that moved further than ``clip`` from where the update found it gets no gradient, unless it moved away from R.

    Args:
        value_T: float [T] with gradient. old_T, return_T: float [T], constant.
    """
    value_T, old_T, return_T = (unmasked(v, mask_T) for v in (value_T, old_T.detach(), return_T.detach()))
    plain_T = (value_T - return_T).square()
    if clip is None:
        return ValueLoss(loss_T=0.5 * plain_T, clipped_T=torch.zeros_like(mask_T))
    bounded_T = (old_T + (value_T - old_T).clamp(-clip, clip) - return_T).square()
    clipped_T = mask_T & (bounded_T > plain_T) & ((value_T - old_T).abs() > clip)
    return ValueLoss(loss_T=0.5 * torch.maximum(plain_T, bounded_T), clipped_T=clipped_T.detach())
