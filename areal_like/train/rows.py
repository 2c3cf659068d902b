"""This rank's rows of one batch, and what passes over them found for every written token.

Legend: ``_T`` written target tokens, row after row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from areal_like.api.trajectory import Trajectory, TrajectoryTag
from areal_like.train.batching import Array, TrainRow

#: fetches trajectories by key, in the order asked for
Fetch = Callable[[Sequence[str]], Sequence[Trajectory]]


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Rows by their index in the batch; ``columns`` hold one tensor of written tokens a row, by name and index.

    Columns: ``prox`` (log-probs under the weights before the first optimiser step), ``ref``, ``value``, ``return``
    (the critic's target), ``keep`` (bool; false where the row teaches nothing).
    """

    rows: dict[int, TrainRow]
    columns: dict[str, dict[int, Tensor]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, members: Sequence[int]) -> list[TrainRow]:
        return [self.rows[i] for i in members]

    def put(self, name: str, members: Sequence[int], value_T: Tensor) -> None:
        """Set column ``name`` of ``members`` from their written tokens, end to end."""
        counts = [written_tokens(self.rows[i].trajectory) for i in members]
        self.columns.setdefault(name, {}).update(zip(members, torch.split(value_T, counts), strict=True))

    def column(self, name: str, members: Iterable[int], like: Tensor) -> Tensor | None:
        """Column ``name`` of ``members`` end to end, None if there is no such column; on the device of ``like``."""
        if name not in self.columns:
            return None
        parts = [self.columns[name][i] for i in members]
        return torch.cat(parts).to(like.device) if parts else like.detach()[:0]

    def set_advantage(self, index: int, advantage: float | Array) -> None:
        self.rows[index] = replace(self.rows[index], advantage=advantage)


def fetch_rows(fetch: Fetch, tags: Sequence[TrajectoryTag], mine: Sequence[int]) -> BatchRows:
    """Rows ``mine`` (indices of ``tags``), with advantage 0.

    Raises:
        RemoteError, RpcError: the store does not have or give a row.
        ValueError: a row is not what its tag says.
    """
    rows = {}
    for index, trajectory in zip(mine, fetch([tags[i].key for i in mine]) if mine else (), strict=True):
        _check_row(tags[index], trajectory)
        rows[index] = TrainRow(trajectory=trajectory, advantage=0.0)
    return BatchRows(rows)


def written_tokens(trajectory: Trajectory) -> int:
    return int(np.count_nonzero(trajectory.loss_mask == 1))


def _check_row(tag: TrajectoryTag, row: Trajectory) -> None:
    """The plan was made from the tag on every rank: a row that differs would break the global denominator."""
    found = (row.length, written_tokens(row))
    if found != (tag.length, tag.loss_tokens):
        raise ValueError(
            f"trajectory {tag.key}: the store holds {found[0]} tokens, {found[1]} of them written, "
            f"but its tag says {tag.length} and {tag.loss_tokens}"
        )
