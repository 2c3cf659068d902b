"""M2PO: drop the tokens that are furthest off policy until the second moment of the rest is small.

Legend: ``_T`` target tokens of a micro-batch; ``_N`` the constrained tokens of the whole minibatch, over all ranks.

The bound is one number for the minibatch, so it is found before the loss: gather :func:`constrained_squares` of every
micro-batch and rank, take :func:`second_moment_bound` of all of them, and give :func:`kept_tokens` to the objective as
``PolicyTerms.keep_T``. A bound per micro-batch would make the gradient depend on how the rows were packed. The ratio is
prox/behave where the paper has theta/behave: known before the forward pass, and the same thing in a step's first
minibatch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_like.algo.behave import behave_weight
from areal_like.algo.settings import ObjectiveSettings
from areal_like.algo.terms import PolicyTerms, TokenLoss, log_ratio, unmasked


def constrained_squares(terms: PolicyTerms) -> Tensor:
    """Squared log-ratios prox/behave [N] of the tokens that the trust region constrains.

    Those are the tokens that a policy gradient would move further from the behaviour policy: A > 0 and ratio > 1, or
    A < 0 and ratio < 1 (Zheng et al. 2025, "Prosperity before collapse", section 4).
    """
    return _log_w(terms)[_constrained(terms)].square()


def second_moment_bound(squares_N: Tensor, limit: float) -> float:
    """Largest squared log-ratio that may stay so that those that stay have a mean of at most ``limit``.

    The largest are dropped first; equal ones are dropped together. inf if nothing need be dropped, 0 if nothing above 0
    may stay.
    """
    ascending_N = squares_N.double().sort().values
    mean_N = ascending_N.cumsum(0) / torch.arange(1, len(ascending_N) + 1, device=ascending_N.device)
    over_N = (mean_N > limit).nonzero()
    if not len(over_N):
        return float("inf")
    first = int(over_N[0])  # a prefix's mean never falls: all longer prefixes are over the limit too
    below_N = ascending_N[:first][ascending_N[:first] < ascending_N[first]]
    return float(below_N[-1]) if len(below_N) else 0.0


def kept_tokens(terms: PolicyTerms, bound: float) -> Tensor:
    """bool [T], false for constrained tokens whose squared log-ratio is over ``bound``."""
    return ~(_constrained(terms) & (_log_w(terms).square() > bound))


def m2po(terms: PolicyTerms, settings: ObjectiveSettings) -> TokenLoss:
    """−w · A · r for the tokens that are kept, unclipped; 0 for the others, which still count in the denominator.

    Raises:
        ValueError: ``terms.keep_T`` is missing.
    """
    if terms.keep_T is None:
        raise ValueError("m2po: keep_T is needed; take it from kept_tokens with the bound of the whole minibatch")
    ratio_T = log_ratio(terms.theta_T, terms.prox_T, terms.mask_T).exp()
    behave = behave_weight(terms, settings)
    return TokenLoss(
        loss_T=-behave.weight_T * unmasked(terms.advantage_T, terms.mask_T) * ratio_T,
        ratio_T=ratio_T.detach(),
        weight_T=behave.weight_T,
        clipped_T=torch.zeros_like(terms.mask_T),
        dropped_T=behave.dropped_T,
    )


def _log_w(terms: PolicyTerms) -> Tensor:
    return log_ratio(terms.prox_T, terms.behave_T, terms.mask_T).detach()


def _constrained(terms: PolicyTerms) -> Tensor:
    return unmasked(terms.advantage_T, terms.mask_T) * _log_w(terms) > 0
