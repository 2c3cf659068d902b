"""What an objective reads and what it returns.

Legend: ``_T`` written and unwritten target tokens of a micro-batch, row after row (any packing); ``_B`` rows.

A *target* token is one that some position predicts: the trainer has already shifted, so entry t of every array
speaks of the same token. Masked entries (``mask_T`` false) may hold anything, even infinities.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: log-ratios are clamped to this before exp: e^30 ≈ 1e13 is past every clip and cap, yet inf - inf cannot arise
MAX_LOG_RATIO = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTerms:
    """One micro-batch as an objective sees it. Rows are whole: no sequence is split over micro-batches.

    Attributes:
        theta_T: float [T], log-prob under the policy being trained; carries the gradient.
        prox_T: float [T], log-prob under the proximal policy; constant.
        behave_T: float [T], log-prob under the policy that wrote the token; constant.
        advantage_T: float [T].
        mask_T: bool [T], true where the policy wrote the token.
        row_T: int64 [T], row that the token belongs to, in [0, rows).
        rows: number of rows B.
        keep_T: bool [T] or None, false where a correction found over the whole batch (M2PO) drops the token.
    """

    theta_T: Tensor
    prox_T: Tensor
    behave_T: Tensor
    advantage_T: Tensor
    mask_T: Tensor
    row_T: Tensor
    rows: int
    keep_T: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Loss of every token, and what was done to it. All but ``loss_T`` are constants.

    Attributes:
        loss_T: float [T], 0 where masked; carries the gradient.
        ratio_T: float [T], theta/prox at the objective's own level; 1 where masked.
        weight_T: float [T], the weight w that multiplied the token; 0 where a correction dropped it.
        clipped_T: bool [T], true where the clip took the gradient away.
        dropped_T: bool [T], true where a correction dropped the token (it still counts in the denominator).
    """

    loss_T: Tensor
    ratio_T: Tensor
    weight_T: Tensor
    clipped_T: Tensor
    dropped_T: Tensor


def unmasked(value_T: Tensor, mask_T: Tensor) -> Tensor:
    """``value_T`` with 0 where masked, so that garbage there reaches neither value nor gradient."""
    return torch.where(mask_T, value_T, torch.zeros((), dtype=value_T.dtype, device=value_T.device))


def log_ratio(numerator_T: Tensor, denominator_T: Tensor, mask_T: Tensor) -> Tensor:
    """log(numerator/denominator) [T], 0 where masked, clamped to ±:data:`MAX_LOG_RATIO`."""
    difference_T = unmasked(numerator_T, mask_T) - unmasked(denominator_T, mask_T)
    return difference_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def row_sum(value_T: Tensor, row_T: Tensor, rows: int) -> Tensor:
    """Sum of the tokens of every row: [T] -> [B]. Differentiable."""
    return torch.zeros(rows, dtype=value_T.dtype, device=value_T.device).index_add(0, row_T, value_T)


def row_mean(value_T: Tensor, mask_T: Tensor, row_T: Tensor, rows: int) -> Tensor:
    """Mean over the unmasked tokens of every row: [T] -> [B]; 0 for rows without any. Differentiable."""
    count_B = row_sum(mask_T.to(value_T.dtype), row_T, rows)
    return row_sum(unmasked(value_T, mask_T), row_T, rows) / count_B.clamp(min=1.0)
