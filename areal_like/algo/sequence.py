"""Objectives whose ratio belongs to the sequence: GSPO, GSPO-token, TOPR.

Legend: ``_T`` target tokens of a micro-batch; ``_B`` rows. A: advantage; w: behaviour weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_like.algo.behave import behave_weight, log_ratio_at
from areal_like.algo.ppo import clipped_surrogate
from areal_like.algo.settings import ObjectiveSettings
from areal_like.algo.terms import PolicyTerms, TokenLoss, log_ratio, unmasked


def gspo(terms: PolicyTerms, settings: ObjectiveSettings) -> TokenLoss:
    """w · max(−A s, −A clip(s, 1−ε, 1+ε_hi)), s = exp(mean over the row of (theta − prox)).

    GSPO (Zheng et al. 2025, eq. 5–7), with the behaviour weight at the same level: w = exp(mean(prox − behave)).
    Every token of a row has the row's loss, so ``seq_mean_token_mean`` gives the paper's mean over sequences.
    """
    log_r_T = log_ratio(terms.theta_T, terms.prox_T, terms.mask_T)
    return _gspo(terms, settings, log_ratio_at("geometric", log_r_T, terms).exp())


def gspo_token(terms: PolicyTerms, settings: ObjectiveSettings) -> TokenLoss:
    """As :func:`gspo` with s_t = sg[s] · exp(theta − sg[theta]): a token's own advantage meets the row's ratio.

    GSPO-token (Zheng et al. 2025, eq. 13–14). With one advantage per row, value and gradient equal GSPO's.
    """
    log_r_T = log_ratio(terms.theta_T, terms.prox_T, terms.mask_T)
    log_s_T = log_ratio_at("geometric", log_r_T.detach(), terms)
    return _gspo(terms, settings, (log_s_T + log_r_T - log_r_T.detach()).exp())


def _gspo(terms: PolicyTerms, settings: ObjectiveSettings, ratio_T: Tensor) -> TokenLoss:
    surrogate_T, clipped_T = clipped_surrogate(ratio_T, unmasked(terms.advantage_T, terms.mask_T), settings)
    behave = behave_weight(terms, settings, level="geometric")
    return TokenLoss(
        loss_T=unmasked(behave.weight_T * surrogate_T, terms.mask_T),
        ratio_T=ratio_T.detach(),
        weight_T=behave.weight_T,
        clipped_T=clipped_T & terms.mask_T,
        dropped_T=behave.dropped_T,
    )


def topr(terms: PolicyTerms, settings: ObjectiveSettings) -> TokenLoss:
    """−sg[c] · A · theta, with c = 1 where A ≥ 0 and c = min(π_theta(row)/π_behave(row), 1) where A < 0.

    Tapered off-policy REINFORCE (Le Roux et al. 2025, eq. 8): good rows are imitated without any weight, bad ones are
    pushed down only as far as the policy would still write them, so that nothing is pushed to −∞. Needs no proximal
    policy, clip or cap; the ratio is the product over the row's tokens.
    """
    log_r_T = log_ratio(terms.theta_T, terms.behave_T, terms.mask_T).detach()
    ratio_T = log_ratio_at("sequence", log_r_T, terms).exp()
    advantage_T = unmasked(terms.advantage_T, terms.mask_T)
    taper_T = torch.where(advantage_T < 0, ratio_T.clamp(max=1.0), 1.0)
    dropped_T = torch.zeros_like(terms.mask_T) if terms.keep_T is None else terms.mask_T & ~terms.keep_T
    taper_T = torch.where(dropped_T, 0.0, taper_T)
    return TokenLoss(
        loss_T=-taper_T * advantage_T * unmasked(terms.theta_T, terms.mask_T),
        ratio_T=ratio_T,
        weight_T=taper_T,
        clipped_T=(advantage_T < 0) & (ratio_T > 1.0),
        dropped_T=dropped_T,
    )
