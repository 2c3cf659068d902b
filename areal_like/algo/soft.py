"""Token objectives that keep a gradient where PPO's clip takes it away: CISPO, SAPO.

Legend: ``_T`` target tokens of a micro-batch. A: advantage; r = exp(theta − prox); w: behaviour weight.
"""

from __future__ import annotations

import torch

from areal_like.algo.behave import behave_weight
from areal_like.algo.settings import ObjectiveSettings
from areal_like.algo.terms import PolicyTerms, TokenLoss, log_ratio, unmasked


def cispo(terms: PolicyTerms, settings: ObjectiveSettings) -> TokenLoss:
    """−w · sg[min(r, 1+ε_hi)] · A · theta: the *weight* is clipped, every token keeps its gradient.

    CISPO (MiniMax-M1, 2025, eq. 4–5), which sets no lower bound. Pair it with a wide ``eps_clip_higher``.
    """
    ratio_T = log_ratio(terms.theta_T, terms.prox_T, terms.mask_T).exp().detach()
    bounded_T = ratio_T.clamp(max=1.0 + settings.eps_high)
    behave = behave_weight(terms, settings)
    gain_T = unmasked(terms.advantage_T, terms.mask_T) * unmasked(terms.theta_T, terms.mask_T)
    return TokenLoss(
        loss_T=-behave.weight_T * bounded_T * gain_T,
        ratio_T=ratio_T,
        weight_T=behave.weight_T,
        clipped_T=terms.mask_T & (ratio_T > bounded_T),
        dropped_T=behave.dropped_T,
    )


def sapo(terms: PolicyTerms, settings: ObjectiveSettings) -> TokenLoss:
    """−w · A · (4/τ) σ(τ (r − 1)), τ by the sign of A: a gate that closes smoothly on both sides of r = 1.

    SAPO (Gao et al. 2025, eq. 5–7). The gate's slope in r is 4 σ (1 − σ): 1 at r = 1, as for plain PPO.
    ``clipped_T`` marks tokens whose slope is below one half.
    """
    ratio_T = log_ratio(terms.theta_T, terms.prox_T, terms.mask_T).exp()
    advantage_T = unmasked(terms.advantage_T, terms.mask_T)
    positive_T = (advantage_T > 0).to(ratio_T.dtype)
    tau_T = positive_T * settings.tau_positive + (1.0 - positive_T) * settings.tau_negative
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1.0))
    behave = behave_weight(terms, settings)
    slope_T = (4.0 * gate_T * (1.0 - gate_T)).detach()
    return TokenLoss(
        loss_T=-behave.weight_T * advantage_T * (4.0 / tau_T) * gate_T,
        ratio_T=ratio_T.detach(),
        weight_T=behave.weight_T,
        clipped_T=terms.mask_T & (slope_T < 0.5),
        dropped_T=behave.dropped_T,
    )
