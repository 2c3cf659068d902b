"""One training step: a batch in, one new version out.

    tags -> advantages, plan -> fetch this rank's rows -> prox pass -> minibatch, minibatch, ... -> report

Legend: ``_T`` written target tokens of a micro-batch; ``_B`` rows of the batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from areal_like.algo import offpolicy
from areal_like.algo.advantages import RewardScale, norm_settings, reward_scale, reward_table, token_advantages
from areal_like.algo.aggregation import aggregate
from areal_like.algo.objectives import get_objective
from areal_like.algo.prox import ProxInputs, proximal_logprobs
from areal_like.algo.settings import objective_settings
from areal_like.algo.terms import PolicyTerms
from areal_like.api.trajectory import Batch, Trajectory, TrajectoryTag, UpdateReport
from areal_like.config.actor import ActorConfig
from areal_like.train.batching import MicroBatch, TrainRow, build_micro_batch
from areal_like.train.engine import StepOutcome, TrainEngine
from areal_like.train.plan import MinibatchPlan, UpdatePlan, plan_update

#: fetches trajectories by key, in the order asked for
Fetch = Callable[[Sequence[str]], Sequence[Trajectory]]


@dataclass(slots=True, kw_only=True)
class _Figures:
    """What an update adds up on this rank, until the ranks are reduced at its end."""

    offpolicy: offpolicy.OffPolicySums
    losses: list[Tensor] = field(default_factory=list)
    outcomes: list[StepOutcome] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


class PpoUpdate:
    """The algorithm of one step, on every rank alike. Collective."""

    def __init__(self, engine: TrainEngine, actor: ActorConfig, fetch: Fetch) -> None:
        self._engine = engine
        self._actor = actor
        self._fetch = fetch
        self._objective = get_objective(actor.objective)
        self._settings = objective_settings(actor)

    def run(self, batch: Batch) -> UpdateReport:
        """Train on ``batch`` and report; figures are reduced over ranks and equal on all of them.

        Raises:
            RemoteError, RpcError: the store does not have or give a row.
            ValueError: a row is not what its tag says.
        """
        parallel = self._engine.parallel
        figures = _Figures(offpolicy=offpolicy.empty(parallel.device))
        started = time.perf_counter()
        tags = batch.trajectories
        plan = plan_update(tags, self._actor, rank=parallel.rank, ranks=parallel.world_size)
        with figures.phase("fetch"):
            rows = self._fetch_rows(tags, plan.rows)
        with figures.phase("prox"):
            prox = self._proximal_pass(plan, rows)
        with figures.phase("train"):
            for done, minibatch in enumerate(plan.minibatches):
                progress = done / len(plan.minibatches)
                self._minibatch(minibatch, rows, prox, batch.version, progress, figures)
        return self._report(batch, plan, figures, started)

    def _fetch_rows(self, tags: Sequence[TrajectoryTag], mine: Sequence[int]) -> dict[int, TrainRow]:
        """This rank's rows by index, with advantages that come from the rewards of the whole batch."""
        if not tags:
            return {}
        table = reward_table([t.reward for t in tags], [t.group_id for t in tags], [t.episode_id for t in tags])
        scale = reward_scale(table, norm_settings(self._actor.adv_norm))
        advantage_B = ((table.reward_B - scale.baseline_B) / scale.scale_B).tolist()
        rows = {}
        for index, trajectory in zip(mine, self._fetch([tags[i].key for i in mine]), strict=True):
            _check_row(tags[index], trajectory)
            rows[index] = _train_row(trajectory, index, advantage_B[index], scale)
        return rows

    def _proximal_pass(self, plan: UpdatePlan, rows: dict[int, TrainRow]) -> dict[int, Tensor]:
        """Log-probs of this rank's rows under the weights as they are before the first optimiser step."""
        if self._actor.prox != "recompute":
            return {}
        found: dict[int, Tensor] = {}
        for members in plan.prox:
            batch = self._build([rows[i] for i in members])
            logprob_T = self._engine.logprobs_without_gradient(batch)
            written = torch.bincount(batch.row_T, minlength=len(members)).tolist()
            found.update(zip(members, torch.split(logprob_T, written), strict=True))
        self._engine.end_of_pass()
        return found

    def _minibatch(
        self,
        plan: MinibatchPlan,
        rows: dict[int, TrainRow],
        prox: dict[int, Tensor],
        version: int,
        progress: float,
        figures: _Figures,
    ) -> None:
        """One optimiser step."""
        total = torch.zeros((), dtype=torch.float64, device=self._engine.parallel.device)
        for number, members in enumerate(plan.micro_batches, start=1):
            batch = self._build([rows[i] for i in members])
            theta_T, entropy_T = self._engine.logprobs(batch)
            recomputed_T = None
            if self._actor.prox == "recompute":
                recomputed_T = torch.cat([prox[i] for i in members] or [theta_T.detach()])
            terms = self._terms(batch, theta_T, recomputed_T, version, progress)
            token_loss = self._objective(terms, self._settings)
            loss = aggregate(
                token_loss.loss_T,
                terms.mask_T,
                terms.row_T,
                terms.rows,
                mode=self._actor.aggregation,
                denominator=plan.denominator,
                constant=self._actor.aggregation_constant,
            )
            self._engine.backward(loss, last=number == len(plan.micro_batches))
            total += loss.detach().double()
            measured = offpolicy.measure(
                terms,
                token_loss,
                entropy_T=entropy_T.detach(),
                version_T=batch.version_T,
                version=version,
                behave_cap=self._actor.behave_cap,
            )
            figures.offpolicy = offpolicy.merge(figures.offpolicy, measured)
        figures.losses.append(total)
        figures.outcomes.append(self._engine.step())

    def _terms(
        self, batch: MicroBatch, theta_T: Tensor, recomputed_T: Tensor | None, version: int, progress: float
    ) -> PolicyTerms:
        mask_T = torch.ones_like(batch.target_T, dtype=torch.bool)
        inputs = ProxInputs(
            behave_T=batch.behave_T,
            theta_T=theta_T,
            recomputed_T=recomputed_T,
            version_T=batch.version_T,
            mask_T=mask_T,
            version=version,
            progress=progress,
        )
        return PolicyTerms(
            theta_T=theta_T,
            prox_T=proximal_logprobs(self._actor.prox, inputs),
            behave_T=batch.behave_T,
            advantage_T=batch.advantage_T,
            mask_T=mask_T,
            row_T=batch.row_T,
            rows=batch.rows,
        )

    def _build(self, rows: Sequence[TrainRow]) -> MicroBatch:
        return build_micro_batch(
            rows,
            layout=self._actor.mb_spec.packing,
            min_new_tokens=self._engine.sampling.min_new_tokens,
            dtype=torch.float64 if self._engine.dtype == torch.float64 else torch.float32,
            device=self._engine.parallel.device,
        )

    def _report(self, batch: Batch, plan: UpdatePlan, figures: _Figures, started: float) -> UpdateReport:
        """Reduce over ranks: sums and maxima are exact; times are those of the slowest rank."""
        parallel = self._engine.parallel
        device = parallel.device
        reduced = offpolicy.OffPolicySums(
            sums=parallel.sum(figures.offpolicy.sums), maxima=parallel.max(figures.offpolicy.maxima)
        )
        losses = parallel.sum(torch.stack(figures.losses)).tolist() if figures.losses else []
        names = sorted(figures.seconds)
        spent = [*(figures.seconds[n] for n in names), time.perf_counter() - started]
        *phases, seconds = parallel.max(torch.tensor(spent, dtype=torch.float64, device=device)).tolist()
        metrics = _step_metrics(losses, figures.outcomes)
        metrics |= {f"offpolicy/{name}": value for name, value in offpolicy.finalise(reduced).items()}
        metrics |= {f"seconds/{name}": value for name, value in zip(names, phases, strict=True)}
        metrics |= {f"reward/{name}": value for name, value in _reward_metrics(batch).items()}
        metrics["train/rows"] = float(len(batch.trajectories))
        metrics["train/micro_batches"] = float(sum(len(m.micro_batches) for m in plan.minibatches))
        tokens = sum(m.tokens for m in plan.minibatches)
        return UpdateReport(version=batch.version, seconds=seconds, tokens=tokens, metrics=metrics)


def _check_row(tag: TrajectoryTag, row: Trajectory) -> None:
    """The plan was made from the tag on every rank: a row that differs would break the global denominator."""
    found = (row.length, int((row.loss_mask == 1).sum()))
    if found != (tag.length, tag.loss_tokens):
        raise ValueError(
            f"trajectory {tag.key}: the store holds {found[0]} tokens, {found[1]} of them written, "
            f"but its tag says {tag.length} and {tag.loss_tokens}"
        )


def _train_row(trajectory: Trajectory, index: int, advantage: float, scale: RewardScale) -> TrainRow:
    if trajectory.returns is None:
        return TrainRow(trajectory=trajectory, advantage=advantage)
    return_T = torch.tensor(trajectory.returns, dtype=torch.float64)
    row_T = torch.full_like(return_T, index, dtype=torch.int64)
    return TrainRow(trajectory=trajectory, advantage=token_advantages(scale, return_T, row_T).numpy())


def _step_metrics(losses: Sequence[float], outcomes: Sequence[StepOutcome]) -> dict[str, float]:
    """Means over the minibatches that took their step; 0 where none did."""
    taken = [(loss, o) for loss, o in zip(losses, outcomes, strict=True) if not o.skipped]
    count = max(len(taken), 1)
    norms = [o.grad_norm for _, o in taken]
    return {
        "train/loss": math.fsum(loss for loss, _ in taken) / count,
        "train/grad_norm": math.fsum(norms) / count,
        "train/grad_norm_max": max(norms, default=0.0),
        "train/lr": outcomes[-1].lr if outcomes else 0.0,
        "train/optimizer_steps": float(len(taken)),
        "train/skipped_minibatches": float(len(outcomes) - len(taken)),
    }


def _reward_metrics(batch: Batch) -> dict[str, float]:
    """Of the batch's rows; ``equal_groups``: fraction of groups that taught nothing, all rewards being equal."""
    rewards = [t.reward for t in batch.trajectories]
    if not rewards:
        return {}
    equal = sum(len({t.reward for t in group.trajectories}) == 1 for group in batch.groups)
    return {
        "mean": math.fsum(rewards) / len(rewards),
        "min": min(rewards),
        "max": max(rewards),
        "equal_groups": equal / len(batch.groups),
    }
