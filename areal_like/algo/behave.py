"""The behaviour weight w: how much likelier the proximal policy is to write what the behaviour policy wrote.

Legend: ``_T`` target tokens of a micro-batch; ``_B`` rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_like.algo.settings import BehaveLevel, ObjectiveSettings
from areal_like.algo.terms import MAX_LOG_RATIO, PolicyTerms, log_ratio, row_mean, row_sum, unmasked


@dataclass(frozen=True, slots=True, kw_only=True)
class BehaveWeight:
    """Constants. ``weight_T`` is 0 where ``dropped_T``; ``capped_T`` marks weights that were truncated."""

    weight_T: Tensor
    capped_T: Tensor
    dropped_T: Tensor


def log_ratio_at(level: BehaveLevel, log_ratio_T: Tensor, terms: PolicyTerms) -> Tensor:
    """Log-ratio of every token at ``level``: its own, its row's sum, or its row's mean. [T] -> [T]."""
    if level == "token":
        return log_ratio_T
    if level == "sequence":
        log_ratio_B = row_sum(unmasked(log_ratio_T, terms.mask_T), terms.row_T, terms.rows)
    else:
        log_ratio_B = row_mean(log_ratio_T, terms.mask_T, terms.row_T, terms.rows)
    return unmasked(log_ratio_B[terms.row_T].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), terms.mask_T)


def behave_weight(terms: PolicyTerms, settings: ObjectiveSettings, level: BehaveLevel | None = None) -> BehaveWeight:
    """w = exp(prox − behave) at ``level``, detached, truncated or masked at ``behave_cap``.

    Token level truncated: TIS (Yao et al. 2025); sequence level: sequence TIS, and with ``mask`` sequence masked
    importance sampling (Liu et al. 2025); ``mask`` with ``behave_floor``: IcePop (Ring-1T, 2025). Tokens that the
    terms' ``keep_T`` excludes are dropped in every mode. ``ignore`` sets w to 1: no correction.

    Args:
        level: overrides ``settings.behave_level`` for objectives that have a level of their own.
    """
    log_w_T = log_ratio(terms.prox_T, terms.behave_T, terms.mask_T).detach()
    weight_T = log_ratio_at(level or settings.behave_level, log_w_T, terms).exp()
    dropped_T = torch.zeros_like(terms.mask_T) if terms.keep_T is None else terms.mask_T & ~terms.keep_T
    capped_T = torch.zeros_like(terms.mask_T)
    if settings.behave_mode == "ignore":
        weight_T = torch.where(dropped_T, 0.0, torch.ones_like(weight_T))
        return BehaveWeight(weight_T=weight_T, capped_T=capped_T, dropped_T=dropped_T)
    if settings.behave_cap is not None:
        over_T = terms.mask_T & (weight_T > settings.behave_cap)
        if settings.behave_mode == "mask":
            dropped_T = dropped_T | over_T
        else:
            weight_T, capped_T = weight_T.clamp(max=settings.behave_cap), over_T
    if settings.behave_floor is not None:
        dropped_T = dropped_T | (terms.mask_T & (weight_T < settings.behave_floor))
    return BehaveWeight(weight_T=torch.where(dropped_T, 0.0, weight_T), capped_T=capped_T, dropped_T=dropped_T)
