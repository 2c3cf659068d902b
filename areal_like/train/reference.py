"""The reference: a frozen model beside the policy, on the same ranks, that the policy is held to.

Legend: ``_T`` written target tokens of a micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_like.train.batching import MicroBatch
from areal_like.train.model import PolicyModel
from areal_like.train.parallel import Parallel
from areal_like.train.parameters import hold


class Reference:
    """Log-probs under weights that never change, of the same distribution as the policy's (temperature, stop ban).

    Every method is collective. It is sharded as the policy is, and has no optimiser.
    """

    def __init__(
        self,
        policy: PolicyModel,
        parallel: Parallel,
        *,
        compute_dtype: torch.dtype | None = None,
        offload: bool = False,
    ) -> None:
        """``offload``: the weights lie in host memory between passes."""
        policy.requires_grad_(False)
        self._policy = policy
        self._parameters = hold(policy, parallel, compute_dtype, offload=offload)

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probs [T] of the written tokens of ``batch``."""
        logprob_T: Tensor = self._policy(batch)[0]
        return logprob_T

    def end_of_pass(self) -> None:
        """Let go of the gathered weights."""
        self._parameters.end_of_pass()
