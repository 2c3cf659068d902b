"""What one update does, decided before it starts: minibatches, shares of ranks, micro-batches, denominators.

Computed from tags alone, by every rank alike, so nothing needs to be agreed over the network. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal_like.algo.balance import CostModel, MicroBatchPlan, plan_micro_batches
from areal_like.algo.measured_cost import Load, load_of
from areal_like.algo.packing import Layout, cut_minibatches, pack
from areal_like.api.trajectory import TrajectoryTag
from areal_like.config.actor import ActorConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MinibatchPlan:
    """One optimiser step. ``micro_batches`` are this rank's rows, as indices into the batch's trajectories.

    Every rank has as many micro-batches; ``denominator`` is that of the whole minibatch, over all ranks. ``rounds``:
    of every round, in which each rank runs one, the loads of all ranks.
    """

    micro_batches: tuple[tuple[int, ...], ...]
    rounds: tuple[tuple[Load, ...], ...]
    denominator: float
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """One update as one rank sees it. ``prox`` are the micro-batches of its no-grad pass, over all its rows."""

    minibatches: tuple[MinibatchPlan, ...]
    prox: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """This rank's rows, in ascending order."""
        return tuple(sorted(row for m in self.minibatches for rows in m.micro_batches for row in rows))


def plan_update(
    tags: Sequence[TrajectoryTag], actor: ActorConfig, *, rank: int, ranks: int, cost: CostModel | None = None
) -> UpdatePlan:
    """Cut a batch into minibatches by group, and spread the rows of each over ``ranks`` by ``cost`` (None: tokens)."""
    lengths = [tag.length for tag in tags]
    layout, budget = actor.mb_spec.packing, actor.mb_spec.max_tokens_per_mb
    minibatches, shares = [], [list[int]() for _ in range(ranks)]
    for rows in cut_minibatches([tag.group_id for tag in tags], actor.ppo_n_minibatches):
        plan = plan_micro_batches([lengths[row] for row in rows], ranks=ranks, budget=budget, layout=layout, cost=cost)
        for share, micro_batches in zip(shares, plan.ranks, strict=True):
            share.extend(rows[i] for members in micro_batches for i in members)
        minibatches.append(_minibatch(tags, rows, plan, actor, rank))
    return UpdatePlan(minibatches=tuple(minibatches), prox=_passes(shares, lengths, budget, layout)[rank])


def _minibatch(
    tags: Sequence[TrajectoryTag], rows: Sequence[int], plan: MicroBatchPlan, actor: ActorConfig, rank: int
) -> MinibatchPlan:
    written = [tags[row].loss_tokens for row in rows]
    by_token = actor.aggregation == "token_mean"
    return MinibatchPlan(
        micro_batches=tuple(tuple(rows[i] for i in members) for members in plan.ranks[rank]),
        rounds=tuple(
            tuple(load_of([tags[rows[i]].length for i in bins[turn]], actor.mb_spec.packing) for bins in plan.ranks)
            for turn in range(plan.micro_batches)
        ),
        denominator=float(sum(written) if by_token else sum(tokens > 0 for tokens in written)),
        rows=len(rows),
        tokens=sum(written),
    )


def _passes(
    shares: Sequence[list[int]], lengths: Sequence[int], budget: int, layout: Layout
) -> list[tuple[tuple[int, ...], ...]]:
    """Micro-batches for one pass over everything a rank has; empty ones bring the ranks to the same number."""
    packed = [
        [
            tuple(sorted(share)[i] for i in members)
            for members in pack([lengths[row] for row in sorted(share)], budget, layout)
        ]
        for share in shares
    ]
    most = max(map(len, packed))
    return [tuple(bins + [()] * (most - len(bins))) for bins in packed]
