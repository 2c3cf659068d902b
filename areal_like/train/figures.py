"""The figures of one update: summed up on every rank, reduced over ranks at its end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from areal_like.algo import offpolicy
from areal_like.algo.offpolicy import OffPolicySums
from areal_like.api.trajectory import Batch, UpdateReport
from areal_like.train.engine import StepOutcome
from areal_like.train.parallel import Parallel
from areal_like.train.plan import UpdatePlan


@dataclass(slots=True, kw_only=True)
class OptimiserFigures:
    """Losses (this rank's shares of the minibatches') and outcomes of one model's optimiser steps."""

    losses: list[Tensor] = field(default_factory=list)
    outcomes: list[StepOutcome] = field(default_factory=list)

    def reduced(self, parallel: Parallel) -> dict[str, float]:
        """Means over the minibatches that took their step; 0 where none did. Collective."""
        losses = parallel.sum(torch.stack(self.losses)).tolist() if self.losses else []
        taken = [(loss, o) for loss, o in zip(losses, self.outcomes, strict=True) if not o.skipped]
        count = max(len(taken), 1)
        norms = [o.grad_norm for _, o in taken]
        return {
            "loss": math.fsum(loss for loss, _ in taken) / count,
            "grad_norm": math.fsum(norms) / count,
            "grad_norm_max": max(norms, default=0.0),
            "lr": self.outcomes[-1].lr if self.outcomes else 0.0,
            "optimizer_steps": float(len(taken)),
            "skipped_minibatches": float(len(self.outcomes) - len(taken)),
        }


class TokenMeans:
    """Means over the tokens of all ranks, by name."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, **values: Tensor) -> None:
        """Add one value a token, [T] each."""
        for name, value_T in values.items():
            counted = torch.stack([value_T.double().sum(), torch.tensor(float(len(value_T)), device=value_T.device)])
            self._sums[name] = self._sums[name] + counted if name in self._sums else counted

    def reduced(self, parallel: Parallel) -> dict[str, float]:
        """Collective: every rank must have added the same names."""
        names = sorted(self._sums)
        if not names:
            return {}
        found = parallel.sum(torch.stack([self._sums[name] for name in names])).tolist()
        return {name: total / max(count, 1.0) for name, (total, count) in zip(names, found, strict=True)}


@dataclass(slots=True, kw_only=True)
class UpdateFigures:
    """What an update adds up on this rank. ``means`` are keyed ``area/name``."""

    offpolicy: offpolicy.OffPolicySums
    policy: OptimiserFigures = field(default_factory=OptimiserFigures)
    means: TokenMeans = field(default_factory=TokenMeans)
    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)
    _waiting: list[Callable[[], OffPolicySums]] = field(default_factory=list)

    def measure_later(self, *arguments: Any, **named: Any) -> None:
        """Call :func:`offpolicy.measure` at the next :meth:`settle`: it counts tokens, and so waits for the device.

        Tensors must be detached: they are kept until then.
        """
        self._waiting.append(partial(offpolicy.measure, *arguments, **named))

    def settle(self) -> None:
        """Add what waits, in order."""
        for measure in self._waiting:
            self.offpolicy = offpolicy.merge(self.offpolicy, measure())
        self._waiting.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def report(
        self, batch: Batch, plan: UpdatePlan, parallel: Parallel, more: Mapping[str, float] | None = None
    ) -> UpdateReport:
        """Reduce over ranks: sums and maxima are exact; times are those of the slowest rank. Collective."""
        reduced = offpolicy.OffPolicySums(
            sums=parallel.sum(self.offpolicy.sums), maxima=parallel.max(self.offpolicy.maxima)
        )
        metrics = {f"train/{name}": value for name, value in self.policy.reduced(parallel).items()}
        names = sorted(self.seconds)
        spent = [*(self.seconds[n] for n in names), time.perf_counter() - self.started]
        *phases, seconds = parallel.max(torch.tensor(spent, dtype=torch.float64, device=parallel.device)).tolist()
        figures = offpolicy.finalise(reduced, version=batch.version)
        metrics |= {f"offpolicy/{name}": value for name, value in figures.items()}
        metrics |= {f"seconds/{name}": value for name, value in zip(names, phases, strict=True)}
        metrics |= {f"reward/{name}": value for name, value in _reward_metrics(batch).items()}
        metrics |= self.means.reduced(parallel) | dict(more or {})
        metrics["train/rows"] = float(len(batch.trajectories))
        metrics["train/micro_batches"] = float(sum(len(m.micro_batches) for m in plan.minibatches))
        tokens = sum(m.tokens for m in plan.minibatches)
        return UpdateReport(version=batch.version, seconds=seconds, tokens=tokens, metrics=metrics)


def _reward_metrics(batch: Batch) -> dict[str, float]:
    """Of the batch's rows; ``equal_groups``: fraction of groups that taught nothing, all rewards being equal."""
    rewards: Sequence[float] = [t.reward for t in batch.trajectories]
    if not rewards:
        return {}
    equal = sum(len({t.reward for t in group.trajectories}) == 1 for group in batch.groups)
    return {
        "mean": math.fsum(rewards) / len(rewards),
        "min": min(rewards),
        "max": max(rewards),
        "equal_groups": equal / len(batch.groups),
    }
