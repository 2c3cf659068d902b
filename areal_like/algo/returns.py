"""Token rewards to returns and generalised advantages.

Legend: ``_T`` target tokens, row after row; ``_B`` rows; ``_L`` written tokens of a row, left aligned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_like.algo.advantages import EQUAL_TOLERANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """``advantage_T`` and the critic's target ``return_T`` = advantage + value; [T] each, 0 where masked."""

    advantage_T: Tensor
    return_T: Tensor


def gae(
    reward_T: Tensor, value_T: Tensor, mask_T: Tensor, row_T: Tensor, rows: int, *, discount: float, gae_lambda: float
) -> Advantages:
    """Generalised advantage estimation over the written tokens of every row (Schulman et al. 2016, eq. 16).

    δ_t = r_t + γ V_{t+1} − V_t and A_t = δ_t + γ λ A_{t+1}, where t+1 is the row's next *written* token and V past the
    last one is 0. Environment tokens in between are no steps; a reward that fell on one must have been added to the
    written token before it. Rows must lie one after another, in the order of their numbers.
    """
    place_T = _place_in_row(mask_T, row_T, rows)
    length = int(place_T[mask_T].max()) + 1 if bool(mask_T.any()) else 0
    row, place = row_T[mask_T], place_T[mask_T]
    reward_BL, value_BL = (torch.zeros(rows, length + 1, dtype=v.dtype, device=v.device) for v in (reward_T, value_T))
    reward_BL[row, place], value_BL[row, place] = reward_T[mask_T], value_T[mask_T]
    advantage_BL = torch.zeros_like(value_BL)
    for t in range(length - 1, -1, -1):
        delta_B = reward_BL[:, t] + discount * value_BL[:, t + 1] - value_BL[:, t]
        advantage_BL[:, t] = delta_B + discount * gae_lambda * advantage_BL[:, t + 1]
    advantage_T = torch.zeros_like(value_T)
    advantage_T[mask_T] = advantage_BL[row, place]
    return Advantages(advantage_T=advantage_T, return_T=torch.where(mask_T, advantage_T + value_T, 0.0))


def discounted_returns(reward_T: Tensor, mask_T: Tensor, row_T: Tensor, rows: int, *, discount: float) -> Tensor:
    """Σ_{k ≥ t} γ^{k−t} r_k over the written tokens of the row [T], 0 where masked: GAE with V = 0 and λ = 1."""
    zero_T = torch.zeros_like(reward_T)
    return gae(reward_T, zero_T, mask_T, row_T, rows, discount=discount, gae_lambda=1.0).advantage_T


def _place_in_row(mask_T: Tensor, row_T: Tensor, rows: int) -> Tensor:
    """How many written tokens of the same row precede each token, int64 [T]."""
    count_T = torch.cumsum(mask_T.long(), 0) - mask_T.long()
    total_B = torch.zeros(rows, dtype=torch.int64, device=mask_T.device).index_add(0, row_T, mask_T.long())
    return count_T - (torch.cumsum(total_B, 0) - total_B)[row_T]


def whiten(value_T: Tensor, sum_over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
    """Values to mean 0 and deviation 1 over all tokens of all ranks [T]; Huang et al. 2022, "37 details of PPO", no. 7.

    Values that are all equal become exactly 0 and are not blown up; so does a single one. Every rank must call it.

    Args:
        value_T: float64 [T], this rank's; may be empty.
        sum_over_ranks: adds a tensor over ranks, on every rank.
    """
    count, total = sum_over_ranks(torch.stack([torch.ones_like(value_T).sum(), value_T.sum()])).tolist()
    if count == 0:
        return value_T
    centred_T = value_T - total / count
    squares = float(sum_over_ranks(centred_T.square().sum()))
    deviation = (squares / count) ** 0.5
    if deviation <= EQUAL_TOLERANCE * max(1.0, abs(total / count)):
        return torch.zeros_like(value_T)
    whitened_T: Tensor = centred_T / deviation
    return whitened_T
