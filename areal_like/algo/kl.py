"""KL(theta ‖ reference) from tokens that another policy wrote: values, and losses whose gradients are right.

Legend: ``_T`` target tokens of a micro-batch. d = theta − ref (log-probs); ρ = exp(theta − behave).

Estimators of the value, for a token drawn from theta (Schulman 2020, "Approximating KL divergence"): k1 = d (unbiased),
k2 = d²/2 (biased, low variance), k3 = e^−d − 1 + d (unbiased, never negative).

Minimising the *value* is not minimising the KL: E[∇k1] = 0, and ∇k3 is the gradient of KL(ref ‖ theta) instead (Tang
and Munos 2025). :func:`kl_loss` has E_behave[∇loss] = ∇KL(theta ‖ ref) for every estimator, off policy too.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from areal_like.algo.terms import log_ratio

KlEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(estimator: KlEstimator, theta_T: Tensor, ref_T: Tensor, mask_T: Tensor) -> Tensor:
    """The estimator's value of every token [T], nats, 0 where masked; carries theta's gradient if it has one."""
    d_T = log_ratio(theta_T, ref_T, mask_T)
    if estimator == "k1":
        return d_T
    return 0.5 * d_T.square() if estimator == "k2" else torch.expm1(-d_T) + d_T


def kl_loss(
    estimator: KlEstimator,
    theta_T: Tensor,
    ref_T: Tensor,
    behave_T: Tensor,
    mask_T: Tensor,
    *,
    behave_cap: float | None = None,
) -> Tensor:
    """Loss [T] with E_behave[∇loss] = ∇KL(theta ‖ ref), token by token; 0 where masked.

    k1, k3: ρ · k with the gradient through both factors, since E_theta[k] is the KL. k2: sg[ρ] · k2, since d · ∇theta
    is the KL's gradient already.

    Args:
        behave_cap: ρ above it is held at it and passes no gradient (bias for variance); None: none.
    """
    value_T = kl_estimate(estimator, theta_T, ref_T.detach(), mask_T)
    rho_T = log_ratio(theta_T, behave_T.detach(), mask_T).exp()
    if behave_cap is not None:
        rho_T = rho_T.clamp(max=behave_cap)
    return torch.where(mask_T, (rho_T.detach() if estimator == "k2" else rho_T) * value_T, 0.0)
