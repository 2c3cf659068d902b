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
        input_ids: int64 [rows, longest] padded on the right, or [1, N] packed: tokens before each row's last target.
        position_ids: int64 [1, N] starting anew with every row (packed), or None.
        row_starts: int32 [rows + 1] (packed), or None; ``row_lengths`` likewise.
        select_T: int64 [T], flat index into ``input_ids`` of the position that predicts each target.
        target_T: int64 [T].
        behave_T, advantage_T: float [T].
        version_T, row_T: int64 [T].
        stop_ban_T: bool [T], true where stop tokens were banned, or None where nothing is.
        written_B: targets of every row, on the host.
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
    written_B: tuple[int, ...]
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

    Only what a written token depends on is laid out: a row ends before its last written token, which is a target only.

    Raises:
        ValueError: a row claims that its first token was written: nothing precedes it to predict it.
    """
    lengths_B = np.array([row.trajectory.length for row in rows] or [1])
    row_N = np.repeat(np.arange(len(lengths_B)), lengths_B)
    column_N = np.arange(row_N.shape[0]) - (np.cumsum(lengths_B) - lengths_B)[row_N]
    tokens_N = _joined(rows, "token_ids", np.int64)
    written_N = _joined(rows, "loss_mask", np.int64) == 1
    if np.any(written_N & (column_N == 0)):
        bad = rows[int(row_N[written_N & (column_N == 0)][0])].trajectory
        raise ValueError(f"episode {bad.episode_id!r}: a trajectory's first token has loss_mask 1; a prompt is needed")

    inputs_B = np.ones_like(lengths_B)
    np.maximum.at(inputs_B, row_N[written_N], column_N[written_N])
    packed = layout == "packed"
    starts_B = np.cumsum(inputs_B) - inputs_B if packed else np.arange(len(inputs_B)) * inputs_B.max()
    flat_N = starts_B[row_N] + column_N
    kept_N = column_N < inputs_B[row_N]
    ids = np.zeros(inputs_B.sum() if packed else inputs_B.max() * len(inputs_B), np.int64)
    ids[flat_N[kept_N]] = tokens_N[kept_N]
    banned_N = _answer_start(written_N, column_N) < min_new_tokens if min_new_tokens > 0 else None

    def tensor(array: Array, as_dtype: torch.dtype) -> Tensor:
        return queued_copy(torch.from_numpy(np.ascontiguousarray(array)).to(as_dtype), device)

    return MicroBatch(
        input_ids=tensor(ids.reshape(1 if packed else len(inputs_B), -1), torch.int64),
        position_ids=tensor(column_N[kept_N][None], torch.int64) if packed else None,
        row_starts=tensor(np.append(starts_B, inputs_B.sum()), torch.int32) if packed else None,
        row_lengths=tuple(inputs_B.tolist()) if packed else (),
        select_T=tensor(flat_N[written_N] - 1, torch.int64),
        target_T=tensor(tokens_N[written_N], torch.int64),
        behave_T=tensor(_joined(rows, "logprobs", np.float32)[written_N], dtype),
        advantage_T=tensor(_advantages(rows, lengths_B)[written_N], dtype),
        version_T=tensor(_joined(rows, "versions", np.int64)[written_N], torch.int64),
        row_T=tensor(row_N[written_N], torch.int64),
        stop_ban_T=None if banned_N is None else tensor(banned_N[written_N], torch.bool),
        written_B=tuple(np.bincount(row_N[written_N], minlength=len(rows))[: len(rows)].tolist()),
        rows=len(rows),
    )


def queued_copy(tensor: Tensor, device: torch.device | str) -> Tensor:
    """``tensor`` of the host on ``device``. From any other than pinned memory the host would wait for the device."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _advantages(rows: Sequence[TrainRow], lengths_B: Array) -> Array:
    """float64 [N] of all rows end to end."""
    if all(isinstance(row.advantage, float) for row in rows):
        return np.repeat(np.array([row.advantage for row in rows] or [0.0]), lengths_B)
    return np.concatenate([np.broadcast_to(row.advantage, row.trajectory.length) for row in rows])


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
