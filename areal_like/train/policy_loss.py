"""The policy's loss on one micro-batch: the objective, the entropy bonus, and the KL to the reference.

Legend: ``_T`` written target tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from areal_like.algo.aggregation import aggregate
from areal_like.algo.kl import KlEstimator, kl_estimate, kl_loss
from areal_like.algo.m2po import constrained_squares, kept_tokens, second_moment_bound
from areal_like.algo.objectives import get_objective
from areal_like.algo.prox import ProxInputs, proximal_logprobs
from areal_like.algo.settings import objective_settings
from areal_like.algo.terms import PolicyTerms
from areal_like.config.actor import ActorConfig
from areal_like.config.reference import ReferenceConfig
from areal_like.train.batching import MicroBatch
from areal_like.train.figures import UpdateFigures
from areal_like.train.parallel import Parallel
from areal_like.train.plan import MinibatchPlan
from areal_like.train.rows import BatchRows

#: KL estimators that are reported, whichever is trained on
_MEASURED: tuple[KlEstimator, ...] = ("k1", "k3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """One optimiser step as its micro-batches see it.

    Attributes:
        plan: its rows and denominators.
        rows: this rank's rows of the whole batch.
        version: trainer version that the batch was taken at.
        progress: minibatches done in this step of the loop over all of them, in [0, 1).
        figures: where figures are added.
    """

    plan: MinibatchPlan
    rows: BatchRows
    version: int
    progress: float
    figures: UpdateFigures


class PolicyLoss:
    """From log-probs to the policy's loss. Holds settings only."""

    def __init__(self, actor: ActorConfig, reference: ReferenceConfig | None = None) -> None:
        self._actor = actor
        self._reference = reference
        self._objective = get_objective(actor.objective)
        self._settings = objective_settings(actor)

    def second_moment_bound(self, minibatch: Minibatch, batches: Sequence[MicroBatch], parallel: Parallel) -> float:
        """M2PO's bound over the minibatch's tokens of all ranks. Collective."""
        squares = [
            constrained_squares(self._terms(minibatch, members, batch, batch.behave_T))
            for members, batch in zip(minibatch.plan.micro_batches, batches, strict=True)
        ]
        mine_N = torch.cat([s.double() for s in squares])
        counts = torch.zeros(parallel.world_size, dtype=torch.int64, device=parallel.device)
        counts[parallel.rank] = len(mine_N)
        counts = parallel.sum(counts)
        start = int(counts[: parallel.rank].sum())
        all_N = torch.zeros(int(counts.sum()), dtype=torch.float64, device=parallel.device)
        all_N[start : start + len(mine_N)] = mine_N
        return second_moment_bound(parallel.sum(all_N), self._settings.m2_limit)

    def share(
        self,
        minibatch: Minibatch,
        members: Sequence[int],
        batch: MicroBatch,
        found: tuple[Tensor, Tensor],
        bound: float | None = None,
    ) -> Tensor:
        """This micro-batch's share of the minibatch's loss, scalar with gradient.

        Args:
            members: the rows in ``batch``, by index.
            found: log-probs and entropies of its tokens, [T] each, with gradient.
            bound: M2PO's, of the whole minibatch.
        """
        theta_T, entropy_T = found
        terms = whole = self._terms(minibatch, members, batch, theta_T)
        if bound is not None:
            kept_T = kept_tokens(whole, bound)
            terms = replace(whole, keep_T=kept_T if whole.keep_T is None else whole.keep_T & kept_T)
        token_loss = self._objective(terms, self._settings)
        minibatch.figures.measure_later(
            replace(terms, theta_T=theta_T.detach()),
            replace(token_loss, loss_T=token_loss.loss_T.detach()),
            entropy_T=entropy_T.detach(),
            version_T=batch.version_T,
            version=minibatch.version,
            behave_cap=self._actor.behave_cap,
        )
        ref_T = minibatch.rows.column("ref", members, theta_T)
        return aggregate(
            self._with_regularisers(token_loss.loss_T, whole, entropy_T, ref_T, minibatch.figures),
            terms.mask_T,
            terms.row_T,
            terms.rows,
            mode=self._actor.aggregation,
            denominator=minibatch.plan.denominator,
            constant=self._actor.aggregation_constant,
        )

    def _with_regularisers(
        self, loss_T: Tensor, terms: PolicyTerms, entropy_T: Tensor, ref_T: Tensor | None, figures: UpdateFigures
    ) -> Tensor:
        """loss − c · entropy + β · KL(theta ‖ ref), token by token; a token that a correction dropped keeps both."""
        if self._actor.entropy_coef:
            loss_T = loss_T - self._actor.entropy_coef * _taught(entropy_T, terms)
        reference = self._reference
        if reference is None or ref_T is None:
            return loss_T
        with torch.no_grad():
            k1_T, k3_T = (kl_estimate(k, terms.theta_T, ref_T, terms.mask_T) for k in _MEASURED)
            figures.means.add(**{"ref/kl_k1": k1_T, "ref/kl_k3": k3_T})
        if reference.kl_in == "reward" or reference.kl_coef == 0.0:
            return loss_T
        kl_T = kl_loss(
            reference.kl_estimator,
            terms.theta_T,
            ref_T,
            terms.behave_T,
            terms.mask_T,
            behave_cap=self._actor.behave_cap,
        )
        return loss_T + reference.kl_coef * _taught(kl_T, terms)

    def _terms(self, minibatch: Minibatch, members: Sequence[int], batch: MicroBatch, theta_T: Tensor) -> PolicyTerms:
        mask_T = torch.ones_like(batch.target_T, dtype=torch.bool)
        inputs = ProxInputs(
            behave_T=batch.behave_T,
            theta_T=theta_T,
            recomputed_T=minibatch.rows.column("prox", members, theta_T),
            version_T=batch.version_T,
            mask_T=mask_T,
            version=minibatch.version,
            progress=minibatch.progress,
        )
        return PolicyTerms(
            theta_T=theta_T,
            prox_T=proximal_logprobs(self._actor.prox, inputs),
            behave_T=batch.behave_T,
            advantage_T=batch.advantage_T,
            mask_T=mask_T,
            row_T=batch.row_T,
            rows=batch.rows,
            keep_T=minibatch.rows.column("keep", members, mask_T),
        )


def _taught(value_T: Tensor, terms: PolicyTerms) -> Tensor:
    """0 for tokens of rows that are to teach nothing (overlong filter)."""
    return value_T if terms.keep_T is None else torch.where(terms.keep_T, value_T, 0.0)
