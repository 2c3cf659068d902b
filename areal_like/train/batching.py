"""Trajectories into the tensors of one micro-batch, padded side by side or packed end to end.

Legend: ``_T`` written target tokens of a micro-batch, row after row. The policy is read at the position *before* each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_like.algo.packing import Layout
from areal_like.api.trajectory import Trajectory

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRow:
    """A trajectory with what the objective needs beside it.

    Attributes:
        advantage: float, or float64 [L] where tokens differ (turn rewards).
    """

    trajectory: Trajectory
    advantage: float | Array


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward pass.

    Attributes:
        input_ids: int64 [rows, longest] padded on the right, or [1, N] packed.
        position_ids: int64 [1, N] starting anew with every row (packed), or None.
        row_starts: int32 [rows + 1] (packed), or None; ``row_lengths`` likewise.
        select_T: int64 [T], flat index into ``input_ids`` of the position that predicts each target.
        target_T: int64 [T].
        behave_T, advantage_T: float [T].
        version_T, row_T: int64 [T].
        stop_ban_T: bool [T], true where stop tokens were banned, or None where nothing is.
        rows: number of rows; 0 in an empty micro-batch, whose ``input_ids`` hold one token that nothing is read from.
    """

    input_ids: Tensor
    position_ids: Tensor | None
    row_starts: Tensor | None
    row_lengths: tuple[int, ...]
    select_T: Tensor
    target_T: Tensor
    behave_T: Tensor
    advantage_T: Tensor
    version_T: Tensor
    row_T: Tensor
    stop_ban_T: Tensor | None
    rows: int


def build_micro_batch(
    rows: Sequence[TrainRow],
    *,
    layout: Layout,
    min_new_tokens: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Lay ``rows`` out for one forward pass; ``dtype`` is that of log-probs and advantages.

    Raises:
        ValueError: a row claims that its first token was written: nothing precedes it to predict it.
    """
    lengths = np.array([row.trajectory.length for row in rows] or [1])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    row_N = np.repeat(np.arange(len(lengths)), lengths)
    column_N = np.arange(starts[-1]) - starts[row_N]
    flat_N = np.arange(starts[-1]) if layout == "packed" else row_N * lengths.max() + column_N
    tokens_N = _joined(rows, "token_ids", np.int64)
    written_N = _joined(rows, "loss_mask", np.int64) == 1
    if np.any(written_N & (column_N == 0)):
        bad = rows[int(row_N[written_N & (column_N == 0)][0])].trajectory
        raise ValueError(
            f"trajectory of episode {bad.episode_id!r}: its first token has loss_mask 1; a prompt is needed"
        )
    size = starts[-1] if layout == "packed" else lengths.max() * len(lengths)
    ids = np.zeros(size, np.int64)
    ids[flat_N] = tokens_N
    advantage_N = np.concatenate(
        [np.broadcast_to(row.advantage, row.trajectory.length) for row in rows] or [np.zeros(1)]
    )

    def tensor(array: Array, as_dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=as_dtype)

    packed = layout == "packed"
    banned_N = _answer_start(written_N, column_N) < min_new_tokens if min_new_tokens > 0 else None
    return MicroBatch(
        input_ids=tensor(ids.reshape(1, -1) if packed else ids.reshape(len(lengths), -1), torch.int64),
        position_ids=tensor(column_N[None], torch.int64) if packed else None,
        row_starts=tensor(starts, torch.int32) if packed else None,
        row_lengths=tuple(lengths.tolist()) if packed else (),
        select_T=tensor(flat_N[written_N] - 1, torch.int64),
        target_T=tensor(tokens_N[written_N], torch.int64),
        behave_T=tensor(_joined(rows, "logprobs", np.float32)[written_N], dtype),
        advantage_T=tensor(advantage_N[written_N], dtype),
        version_T=tensor(_joined(rows, "versions", np.int64)[written_N], torch.int64),
        row_T=tensor(row_N[written_N], torch.int64),
        stop_ban_T=None if banned_N is None else tensor(banned_N[written_N], torch.bool),
        rows=len(rows),
    )


def _joined(rows: Sequence[TrainRow], field: str, dtype: npt.DTypeLike) -> Array:
    """One array of all rows end to end; a single 0 where there are no rows."""
    if not rows:
        return np.zeros(1, dtype)
    return np.concatenate([getattr(row.trajectory, field) for row in rows]).astype(dtype, copy=False)


def _answer_start(written_N: Array, column_N: Array) -> Array:
    """How many tokens of its answer precede each written token. An answer is a run of written tokens of one row."""
    index_N = np.arange(written_N.shape[0])
    continues_N = np.concatenate([[False], written_N[:-1]]) & (column_N > 0)
    start_N = np.maximum.accumulate(np.where(written_N & ~continues_N, index_N, 0))
    return np.asarray(index_N - start_N)
