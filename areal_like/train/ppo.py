"""One training step: a batch in, one new version out.

tags -> plan -> fetch this rank's rows -> passes (prox, ref, values) -> advantages -> minibatches -> report

Legend: ``_T`` written target tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_like.algo import offpolicy
from areal_like.algo.balance import CostModel
from areal_like.algo.measured_cost import MeasuredCost
from areal_like.algo.settings import ShapingSettings, shaping_settings
from areal_like.api.trajectory import Batch, UpdateReport
from areal_like.config.actor import ActorConfig
from areal_like.config.reference import ReferenceConfig
from areal_like.train.advantage import AdvantageRule
from areal_like.train.batching import MicroBatch, TrainRow, build_micro_batch
from areal_like.train.critic import Critic
from areal_like.train.engine import TrainEngine
from areal_like.train.figures import UpdateFigures
from areal_like.train.plan import UpdatePlan, plan_update
from areal_like.train.policy_loss import Minibatch, PolicyLoss
from areal_like.train.reference import Reference
from areal_like.train.rows import BatchRows, Fetch, fetch_rows
from areal_like.train.stopwatch import Stopwatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Companions:
    """The models beside the policy, where the experiment has them, and how they are used.

    Attributes:
        ref: settings of ``reference``; both or neither.
        whiten: whether the critic's advantages are normalised.
        max_new_tokens: what the length options of ``actor.shaping`` measure, unless they name a limit.
    """

    critic: Critic | None = None
    reference: Reference | None = None
    ref: ReferenceConfig | None = None
    whiten: bool = True
    max_new_tokens: int | None = None

    def shaping(self, actor: ActorConfig) -> ShapingSettings:
        return shaping_settings(actor.shaping, self.max_new_tokens)


class PpoUpdate:
    """The algorithm of one step, on every rank alike. Collective."""

    def __init__(
        self,
        engine: TrainEngine,
        actor: ActorConfig,
        fetch: Fetch,
        companions: Companions | None = None,
        *,
        watch: Stopwatch | None = None,
    ) -> None:
        """``watch`` times micro-batches where rows are balanced by that (``mb_spec.balance: measured``)."""
        companions = companions or Companions()
        self._engine = engine
        self._actor = actor
        self._fetch = fetch
        self._critic = companions.critic
        self._reference = companions.reference
        kl_in_reward = (
            companions.ref.kl_coef if companions.ref is not None and companions.ref.kl_in == "reward" else None
        )
        self._advantages = AdvantageRule(
            actor=actor,
            parallel=engine.parallel,
            shaping=companions.shaping(actor),
            kl_in_reward=kl_in_reward,
            whiten=companions.whiten,
        )
        self._needs_prox = actor.prox == "recompute" or kl_in_reward is not None
        self._loss = PolicyLoss(actor, companions.ref)
        self._watch = watch or Stopwatch(engine.parallel.device)
        self._measured = MeasuredCost(engine.cost) if actor.mb_spec.balance == "measured" else None

    @property
    def cost(self) -> CostModel:
        """By which the rows of the next batch are spread over ranks; the same on all of them."""
        return self._engine.cost if self._measured is None else self._measured.cost

    def run(self, batch: Batch) -> UpdateReport:
        """Train on ``batch`` and report; figures are reduced over ranks and equal on all of them.

        Raises:
            RemoteError, RpcError: the store does not have or give a row.
            ValueError: a row is not what its tag says.
        """
        parallel = self._engine.parallel
        figures = UpdateFigures(offpolicy=offpolicy.empty(parallel.device))
        tags = batch.trajectories
        plan = plan_update(tags, self._actor, rank=parallel.rank, ranks=parallel.world_size, cost=self.cost)
        with figures.phase("fetch"):
            rows = fetch_rows(self._fetch, tags, plan.rows)
        self._passes(plan, rows, figures)
        self._advantages.assign(tags, rows)
        with figures.phase("train"):
            for done, part in enumerate(plan.minibatches):
                progress = done / len(plan.minibatches)
                self._minibatch(
                    Minibatch(plan=part, rows=rows, version=batch.version, progress=progress, figures=figures)
                )
        if self._critic is not None:
            with figures.phase("critic"):
                for part in plan.minibatches:
                    self._critic.learn(part, rows, self._build)
        more = self._critic.report(parallel) if self._critic is not None else {}
        return figures.report(batch, plan, parallel, more | self._learn_cost(plan))

    def _passes(self, plan: UpdatePlan, rows: BatchRows, figures: UpdateFigures) -> None:
        """What is known of every token before the first optimiser step."""
        with figures.phase("prox"):
            if self._needs_prox:
                self._one_pass(plan, rows, "prox", self._engine.logprobs_without_gradient)
                self._engine.end_of_pass()
        if self._reference is not None:
            with figures.phase("ref"):
                self._one_pass(plan, rows, "ref", self._reference.logprobs)
                self._reference.end_of_pass()
        if self._critic is not None:
            with figures.phase("values"):
                self._one_pass(plan, rows, "value", self._critic.values)
                self._critic.end_of_pass()

    def _one_pass(self, plan: UpdatePlan, rows: BatchRows, column: str, model: Callable[[MicroBatch], Tensor]) -> None:
        for members in plan.prox:
            rows.put(column, members, model(self._build(rows.of(members))))

    def _minibatch(self, minibatch: Minibatch) -> None:
        """One optimiser step."""
        total = torch.zeros((), dtype=torch.float64, device=self._engine.parallel.device)
        bound = self._second_moment_bound(minibatch)
        shares = minibatch.plan.micro_batches
        for number, members in enumerate(shares, start=1):
            with self._watch.round():
                batch = self._build(minibatch.rows.of(members))
                loss = self._loss.share(minibatch, members, batch, self._engine.logprobs(batch), bound)
                self._engine.backward(loss, last=number == len(shares))
            total += loss.detach().double()
        minibatch.figures.policy.losses.append(total)
        minibatch.figures.policy.outcomes.append(self._engine.step())
        minibatch.figures.settle()

    def _learn_cost(self, plan: UpdatePlan) -> dict[str, float]:
        """From the seconds of every round: those of its slowest rank, for which the others wait in collectives."""
        seconds = self._watch.seconds()
        if self._measured is None:
            return {}
        mine = torch.tensor(seconds, dtype=torch.float64, device=self._engine.parallel.device)
        slowest = self._engine.parallel.max(mine).tolist()
        self._measured.learn([loads for part in plan.minibatches for loads in part.rounds], slowest)
        return {f"balance/{name}": value for name, value in self._measured.figures().items()}

    def _second_moment_bound(self, minibatch: Minibatch) -> float | None:
        if self._actor.objective != "m2po":
            return None
        batches = [self._build(minibatch.rows.of(members)) for members in minibatch.plan.micro_batches]
        return self._loss.second_moment_bound(minibatch, batches, self._engine.parallel)

    def _build(self, rows: Sequence[TrainRow]) -> MicroBatch:
        return build_micro_batch(
            rows,
            layout=self._actor.mb_spec.packing,
            min_new_tokens=self._engine.sampling.min_new_tokens,
            dtype=torch.float64 if self._engine.dtype == torch.float64 else torch.float32,
            device=self._engine.parallel.device,
        )
