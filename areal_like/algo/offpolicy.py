"""How far the data is from the policy: figures that come with every correction.

Legend: ``_T`` target tokens of a micro-batch; ``_B`` rows.

Everything is kept as sums and maxima, float64, so that micro-batches and ranks are merged exactly: add the ``sums``,
take the maximum of the ``maxima`` (one all-reduce each), and only then :func:`finalise`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto

import torch
from torch import Tensor

from areal_like.algo.terms import PolicyTerms, TokenLoss, log_ratio, row_sum

#: lags 0..LAG_BINS-2 have a bin each; the last bin holds all larger ones
LAG_BINS = 18


class _Sum(IntEnum):
    """Slots of ``OffPolicySums.sums``; the lag histogram follows them."""

    TOKENS = 0
    WEIGHT = auto()
    WEIGHT_SQUARED = auto()
    K1 = auto()
    K3 = auto()
    UPDATE_K1 = auto()
    UPDATE_K3 = auto()
    CLIPPED = auto()
    DROPPED = auto()
    CAPPED = auto()
    ENTROPY = auto()
    BEHAVE_NLL = auto()
    PROX_NLL = auto()
    LAG = auto()
    FRESH_TOKENS = auto()
    FRESH_GAP = auto()
    FRESH_GAP_SQUARED = auto()
    ROWS = auto()
    ROW_WEIGHT = auto()
    ROW_WEIGHT_SQUARED = auto()
    REJECTED_ROWS = auto()


class _Maximum(IntEnum):
    """Slots of ``OffPolicySums.maxima``."""

    WEIGHT = 0
    RATIO = auto()
    LAG = auto()
    FRESH_GAP = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicySums:
    """``sums`` float64 [S] and ``maxima`` float64 [M]; merge over parts with :func:`merge` or all-reduces."""

    sums: Tensor
    maxima: Tensor


def empty(device: torch.device | str = "cpu") -> OffPolicySums:
    """The neutral element of :func:`merge`: what a rank without rows contributes."""
    return OffPolicySums(
        sums=torch.zeros(len(_Sum) + LAG_BINS, dtype=torch.float64, device=device),
        maxima=torch.zeros(len(_Maximum), dtype=torch.float64, device=device),
    )


def merge(left: OffPolicySums, right: OffPolicySums) -> OffPolicySums:
    return OffPolicySums(sums=left.sums + right.sums, maxima=torch.maximum(left.maxima, right.maxima))


@torch.no_grad()
def measure(
    terms: PolicyTerms, loss: TokenLoss, *, entropy_T: Tensor, version_T: Tensor, version: int, behave_cap: float | None
) -> OffPolicySums:
    """Figures of one micro-batch.

    The weight is exp(prox − behave) before truncation, except that the clamp of :func:`log_ratio` bounds it. *Fresh*
    tokens are those of rows written wholly under ``version``: their log-prob gap is pure numerics, so only they feed
    the alarm.

    Args:
        entropy_T: float [T] of the current policy.
        version_T: int [T], weight version that wrote each token.
        version: trainer version that the batch was taken at.
        behave_cap: as in the objective; counts the weights over it.
    """
    mask_T = terms.mask_T
    if not bool(mask_T.any()):
        return empty(mask_T.device)
    log_w_T = log_ratio(terms.prox_T, terms.behave_T, mask_T).double()[mask_T]
    log_r_T = log_ratio(terms.theta_T, terms.prox_T, mask_T).double()[mask_T]
    weight_T, ratio_T = log_w_T.exp(), log_r_T.exp()
    lag_T = (version - version_T[mask_T]).clamp(min=0)
    row_T = terms.row_T[mask_T]
    stale_B = row_sum((lag_T > 0).double(), row_T, terms.rows) > 0
    gap_T = log_w_T[~stale_B[row_T]].abs()
    written_B = row_sum(torch.ones_like(log_w_T), row_T, terms.rows) > 0
    row_weight_B = row_sum(log_w_T, row_T, terms.rows)[written_B].clamp(-30.0, 30.0).exp()
    dropped_B = row_sum((loss.dropped_T & mask_T).double()[mask_T], row_T, terms.rows)
    over_T = weight_T > (behave_cap if behave_cap is not None else float("inf"))
    sums = {
        _Sum.TOKENS: mask_T.sum(),
        _Sum.WEIGHT: weight_T.sum(),
        _Sum.WEIGHT_SQUARED: weight_T.square().sum(),
        _Sum.K1: -log_w_T.sum(),
        _Sum.K3: (weight_T - 1 - log_w_T).sum(),
        _Sum.UPDATE_K1: -log_r_T.sum(),
        _Sum.UPDATE_K3: (ratio_T - 1 - log_r_T).sum(),
        _Sum.CLIPPED: (loss.clipped_T & mask_T).sum(),
        _Sum.DROPPED: (loss.dropped_T & mask_T).sum(),
        _Sum.CAPPED: over_T.sum(),
        _Sum.ENTROPY: entropy_T.double()[mask_T].sum(),
        _Sum.BEHAVE_NLL: -terms.behave_T.double()[mask_T].sum(),
        _Sum.PROX_NLL: -terms.prox_T.double()[mask_T].sum(),
        _Sum.LAG: lag_T.sum(),
        _Sum.FRESH_TOKENS: torch.ones_like(gap_T).sum(),
        _Sum.FRESH_GAP: gap_T.sum(),
        _Sum.FRESH_GAP_SQUARED: gap_T.square().sum(),
        _Sum.ROWS: written_B.sum(),
        _Sum.ROW_WEIGHT: row_weight_B.sum(),
        _Sum.ROW_WEIGHT_SQUARED: row_weight_B.square().sum(),
        _Sum.REJECTED_ROWS: (written_B & (dropped_B == row_sum(torch.ones_like(log_w_T), row_T, terms.rows))).sum(),
    }
    lags = torch.bincount(lag_T.clamp(max=LAG_BINS - 1).long(), minlength=LAG_BINS)
    maxima = {
        _Maximum.WEIGHT: weight_T.max(),
        _Maximum.RATIO: ratio_T.max(),
        _Maximum.LAG: lag_T.max(),
        _Maximum.FRESH_GAP: torch.cat([gap_T, gap_T.new_zeros(1)]).max(),
    }
    return OffPolicySums(
        sums=torch.cat([torch.stack([sums[slot].double() for slot in _Sum]), lags.double()]),
        maxima=torch.stack([maxima[slot].double() for slot in _Maximum]),
    )


def finalise(figures: OffPolicySums, *, version: int | None = None) -> dict[str, float]:
    """Named figures from fully reduced sums. Log-prob gaps are nats; fractions are of all unmasked tokens.

    * ``ess``: (Σw)² / (n Σw²), 1 on policy, 1/n where one token has all the weight (Kong 1992); ``ess_sequence`` the
      same over rows with the product of their tokens' weights.
    * ``kl_k1``, ``kl_k3``: KL(behave ‖ prox) as −mean log w and mean(w − 1 − log w) (Schulman 2020).
    * ``chi2``: mean w² − 1. ``weight_max``: largest w before truncation.
    * ``update_kl_*``, ``ratio_max``: the same between prox and theta, within this step.
    * ``perplexity_gap``: exp(prox NLL − behave NLL) − 1.
    * ``logprob_gap_*``: |prox − behave| over rows written wholly under the current version.
    * ``dropped_fraction`` of tokens, ``rejected_fraction`` of rows: those of which every token was dropped.
    * ``lag_tokens_<n>``: tokens that are n versions old; with ``version``, the trainer's, ``version_tokens_<v>`` too:
      tokens that version v wrote. The oldest bin of either holds all older ones and is marked ``+``.
    """
    s = figures.sums.tolist()
    m = figures.maxima.tolist()
    tokens = max(s[_Sum.TOKENS], 1.0)
    fresh = max(s[_Sum.FRESH_TOKENS], 1.0)
    nll_gap = (s[_Sum.PROX_NLL] - s[_Sum.BEHAVE_NLL]) / tokens
    named = {
        "tokens": s[_Sum.TOKENS],
        "ess": _effective(s[_Sum.WEIGHT], s[_Sum.WEIGHT_SQUARED], s[_Sum.TOKENS]),
        "ess_sequence": _effective(s[_Sum.ROW_WEIGHT], s[_Sum.ROW_WEIGHT_SQUARED], s[_Sum.ROWS]),
        "weight_mean": s[_Sum.WEIGHT] / tokens,
        "weight_max": m[_Maximum.WEIGHT],
        "kl_k1": s[_Sum.K1] / tokens,
        "kl_k3": s[_Sum.K3] / tokens,
        "chi2": s[_Sum.WEIGHT_SQUARED] / tokens - 1.0 if s[_Sum.TOKENS] else 0.0,
        "update_kl_k1": s[_Sum.UPDATE_K1] / tokens,
        "update_kl_k3": s[_Sum.UPDATE_K3] / tokens,
        "ratio_max": m[_Maximum.RATIO],
        "clipped_fraction": s[_Sum.CLIPPED] / tokens,
        "dropped_fraction": s[_Sum.DROPPED] / tokens,
        "rejected_fraction": s[_Sum.REJECTED_ROWS] / max(s[_Sum.ROWS], 1.0),
        "capped_fraction": s[_Sum.CAPPED] / tokens,
        "entropy": s[_Sum.ENTROPY] / tokens,
        "perplexity_gap": torch.tensor(nll_gap, dtype=torch.float64).expm1().item(),
        "lag_mean": s[_Sum.LAG] / tokens,
        "lag_max": m[_Maximum.LAG],
        "logprob_gap_mean": s[_Sum.FRESH_GAP] / fresh,
        "logprob_gap_rms": (s[_Sum.FRESH_GAP_SQUARED] / fresh) ** 0.5,
        "logprob_gap_max": m[_Maximum.FRESH_GAP],
        "fresh_fraction": s[_Sum.FRESH_TOKENS] / tokens,
    }
    bins = {(lag, "+" if lag == LAG_BINS - 1 else ""): n for lag, n in enumerate(s[len(_Sum) :]) if n}
    named |= {f"lag_tokens_{lag}{more}": n for (lag, more), n in bins.items()}
    if version is not None:
        named |= {f"version_tokens_{version - lag}{more}": n for (lag, more), n in bins.items()}
    return named


def _effective(total: float, squares: float, count: float) -> float:
    return total * total / (count * squares) if count and squares else 1.0
