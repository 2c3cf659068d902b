"""Supervised fine-tuning on the engine that RL uses: maximum likelihood of the tokens marked by ``loss_mask``.

The loss is the mean negative log-likelihood over the batch's marked tokens, whatever the ranks and micro-batches. Other
objectives on fixed rows (reward models, preference pairs, distillation) fit beside it: rows in, one optimiser step out.

Legend: ``_T`` marked target tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from areal_like.algo.aggregation import aggregate
from areal_like.algo.balance import plan_micro_batches
from areal_like.api.trajectory import NOT_WRITTEN, Trajectory
from areal_like.config.actor import MicroBatchConfig
from areal_like.train.batching import MicroBatch, TrainRow, build_micro_batch
from areal_like.train.engine import TrainEngine
from areal_like.train.rows import written_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SftReport:
    """One step: mean loss in nats a token, over ``tokens`` of all ranks; ``skipped`` if its gradient was not finite."""

    loss: float
    tokens: int
    grad_norm: float
    lr: float
    skipped: bool


def supervised_row(token_ids: Sequence[int], loss_mask: Sequence[int]) -> Trajectory:
    """A row to learn from; the first token cannot be marked, since nothing precedes it."""
    return Trajectory(
        token_ids=np.asarray(token_ids, np.int32),
        loss_mask=np.asarray(loss_mask, np.int32),
        logprobs=np.zeros(len(token_ids), np.float32),
        versions=np.full(len(token_ids), NOT_WRITTEN, np.int32),
        reward=0.0,
    )


class SftUpdate:
    """Optimiser steps on rows. Collective; every rank is given the whole batch and computes its share."""

    def __init__(self, engine: TrainEngine, mb_spec: MicroBatchConfig | None = None) -> None:
        self._engine = engine
        self._spec = mb_spec or MicroBatchConfig()

    def run(self, rows: Sequence[Trajectory]) -> SftReport:
        """One optimiser step.

        Raises:
            ValueError: no token is marked, or a row's first one is.
        """
        tokens = sum(written_tokens(row) for row in rows)
        if not tokens:
            raise ValueError(f"sft: none of {len(rows)} rows has a token with loss_mask 1; there is nothing to learn")
        parallel = self._engine.parallel
        plan = plan_micro_batches(
            [row.length for row in rows],
            ranks=parallel.world_size,
            budget=self._spec.max_tokens_per_mb,
            layout=self._spec.packing,
        )
        mine = plan.ranks[parallel.rank]
        total = torch.zeros((), dtype=torch.float64, device=parallel.device)
        for number, members in enumerate(mine, start=1):
            batch = self._build([rows[i] for i in members])
            logprob_T, _ = self._engine.logprobs(batch)
            loss = aggregate(
                -logprob_T,
                torch.ones_like(batch.target_T, dtype=torch.bool),
                batch.row_T,
                batch.rows,
                mode="token_mean",
                denominator=float(tokens),
            )
            self._engine.backward(loss, last=number == len(mine))
            total += loss.detach().double()
        outcome = self._engine.step()
        return SftReport(
            loss=float(parallel.sum(total)),
            tokens=tokens,
            grad_norm=outcome.grad_norm,
            lr=outcome.lr,
            skipped=outcome.skipped,
        )

    def _build(self, rows: Sequence[Trajectory]) -> MicroBatch:
        return build_micro_batch(
            [TrainRow(trajectory=row, advantage=0.0) for row in rows],
            layout=self._spec.packing,
            dtype=torch.float64 if self._engine.dtype == torch.float64 else torch.float32,
            device=self._engine.parallel.device,
        )
