"""Log-probs of the proximal policy, the centre of the trust region.

Legend: ``_T`` target tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from areal_like.algo.terms import log_ratio

ProxMode = Literal["recompute", "interpolate", "behave"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxInputs:
    """What the three ways of finding prox read.

    Attributes:
        behave_T: float [T], log-probs under the policy that wrote the token.
        theta_T: float [T], under the policy as it is now; its gradient is not used.
        recomputed_T: float [T] or None; one no-grad pass over the batch before its first optimiser step.
        version_T: int [T], weight version that wrote the token.
        mask_T: bool [T], true where the policy wrote the token.
        version: trainer version v that the batch was taken at.
        progress: m/M: minibatches already done in this step over all of them, in [0, 1).
    """

    behave_T: Tensor
    theta_T: Tensor
    recomputed_T: Tensor | None
    version_T: Tensor
    mask_T: Tensor
    version: int
    progress: float


def interpolation_weight(version_T: Tensor, version: int, progress: float) -> Tensor:
    """α = (v − b)/(v − b + m/M) [T], 0 where b = v; float64. Exact if log-probs move linearly in the version."""
    lag_T = (version - version_T).clamp(min=0).to(torch.float64)
    return torch.where(lag_T > 0, lag_T / (lag_T + progress), 0.0)  # 0 / 0 is NaN and not chosen


def proximal_logprobs(mode: ProxMode, inputs: ProxInputs) -> Tensor:
    """Log-probs of the proximal policy [T], detached.

    * ``recompute``: of the weights at version v (AReaL, Fu et al. 2025).
    * ``interpolate``: behave + α · (theta − behave), log-linear in the version (DESIGN.md, section 7).
    * ``behave``: the behaviour policy itself, which makes decoupled PPO plain PPO.

    Raises:
        ValueError: ``recompute`` without ``recomputed_T``.
    """
    if mode == "behave":
        return inputs.behave_T.detach()
    if mode == "interpolate":
        alpha_T = interpolation_weight(inputs.version_T, inputs.version, inputs.progress).to(inputs.theta_T.dtype)
        step_T = log_ratio(inputs.theta_T.detach(), inputs.behave_T, inputs.mask_T)
        return inputs.behave_T.detach() + alpha_T * step_T
    if inputs.recomputed_T is None:
        raise ValueError("prox recompute: log-probs of the version the batch was taken at are needed; got none")
    return inputs.recomputed_T.detach()
