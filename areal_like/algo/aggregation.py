"""From token losses to one number whose gradients add up over micro-batches and ranks.

Legend: ``_T`` target tokens of a micro-batch; ``_B`` rows.

Every function divides by a *global* denominator: that of the whole minibatch, over all micro-batches and ranks. So the
gradients of the parts sum to the gradient of the whole, whatever the cut. Tokens that a correction dropped still count.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from areal_like.algo.terms import row_mean, row_sum

AggregationMode = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]


def local_denominator(mode: AggregationMode, mask_T: Tensor, row_T: Tensor, rows: int) -> float:
    """This part's share of the denominator: its tokens, or its rows that have any. Sum it over parts and ranks."""
    if mode == "token_mean":
        return float(mask_T.sum())
    return float((row_sum(mask_T.to(torch.float64), row_T, rows) > 0).sum())


def aggregate(
    loss_T: Tensor,
    mask_T: Tensor,
    row_T: Tensor,
    rows: int,
    *,
    mode: AggregationMode,
    denominator: float,
    constant: float | None = None,
) -> Tensor:
    """This part's share of the minibatch's loss (scalar).

    * ``token_mean``: Σ_t l_t / tokens (DAPO, Yu et al. 2025).
    * ``seq_mean_token_mean``: Σ_rows (mean_t l_t) / rows (GRPO, Shao et al. 2024, eq. 3).
    * ``seq_mean_token_sum``: Σ_rows (Σ_t l_t) / (constant · rows) (Dr. GRPO, Liu et al. 2025).

    Args:
        denominator: sum of :func:`local_denominator` over every part of the minibatch on every rank.
        constant: divisor of ``seq_mean_token_sum``, usually the most tokens an answer may have.

    Raises:
        ValueError: the denominator or the constant is missing, or smaller than what this part alone holds.
    """
    # counting on a CUDA device would wait for it, once a micro-batch; there the caller's word is taken
    local = 0.0 if loss_T.is_cuda else local_denominator(mode, mask_T, row_T, rows)
    _check(mode, denominator, constant, local)
    divisor = max(denominator, 1.0)  # 0 only where no token counts, and then the numerator is 0 too
    if mode == "seq_mean_token_mean":
        return row_mean(loss_T, mask_T, row_T, rows).sum() / divisor
    total = torch.where(mask_T, loss_T, 0.0).sum()
    return total / (divisor if mode == "token_mean" else divisor * float(constant or 1.0))


def _check(mode: AggregationMode, denominator: float | None, constant: float | None, local: float) -> None:
    if denominator is None or not denominator >= local:  # NaN too
        raise ValueError(
            f"aggregation {mode}: the global denominator of the minibatch is needed and must cover this part's "
            f"{local:g}; got {denominator}; sum local_denominator over all micro-batches and ranks first"
        )
    if mode == "seq_mean_token_sum" and (constant is None or constant <= 0):
        raise ValueError(f"aggregation {mode}: needs a constant > 0 (tokens an answer may have), got {constant}")
