"""PPO and its decoupled form.

Legend: ``_T`` target tokens of a micro-batch. A: advantage; r = exp(theta − prox); w: behaviour weight.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from areal_like.algo.behave import behave_weight
from areal_like.algo.settings import ObjectiveSettings
from areal_like.algo.terms import PolicyTerms, TokenLoss, log_ratio, unmasked


def clipped_surrogate(ratio_T: Tensor, advantage_T: Tensor, settings: ObjectiveSettings) -> tuple[Tensor, Tensor]:
    """max(−A r, −A clip(r, 1−ε, 1+ε_hi)) [T], with the dual clip; and a bool [T] where the clip won.

    Asymmetric ε: DAPO (Yu et al. 2025), eq. 10. Dual clip: min(·, −A c) where A < 0 (Ye et al. 2020, eq. 5).
    """
    plain_T = -advantage_T * ratio_T
    bounded_T = -advantage_T * ratio_T.clamp(1.0 - settings.eps_clip, 1.0 + settings.eps_high)
    loss_T, clipped_T = torch.maximum(plain_T, bounded_T), bounded_T > plain_T
    if settings.c_clip is not None:
        ceiling_T = -advantage_T * settings.c_clip
        dual_T = (advantage_T < 0) & (ceiling_T < loss_T)
        loss_T, clipped_T = torch.where(dual_T, ceiling_T, loss_T), clipped_T | dual_T
    return loss_T, clipped_T


def decoupled_ppo(terms: PolicyTerms, settings: ObjectiveSettings) -> TokenLoss:
    """w · max(−A r, −A clip(r, 1−ε, 1+ε_hi)): the trust region is centred on prox, not on behave.

    Decoupled PPO (Hilton et al. 2021, eq. 2; AReaL, Fu et al. 2025, eq. 5). The dual clip acts before w.
    """
    ratio_T = log_ratio(terms.theta_T, terms.prox_T, terms.mask_T).exp()
    surrogate_T, clipped_T = clipped_surrogate(ratio_T, unmasked(terms.advantage_T, terms.mask_T), settings)
    behave = behave_weight(terms, settings)
    return TokenLoss(
        loss_T=unmasked(behave.weight_T * surrogate_T, terms.mask_T),
        ratio_T=ratio_T.detach(),
        weight_T=behave.weight_T,
        clipped_T=clipped_T & terms.mask_T,
        dropped_T=behave.dropped_T,
    )


def ppo(terms: PolicyTerms, settings: ObjectiveSettings) -> TokenLoss:
    """max(−A r, −A clip(r, 1−ε, 1+ε_hi)) with r = exp(theta − behave): "naive" PPO on stale data.

    PPO (Schulman et al. 2017, eq. 7). The proximal policy is the behaviour policy, so w = 1.
    """
    return decoupled_ppo(replace(terms, prox_T=terms.behave_T), settings)
