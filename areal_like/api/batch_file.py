"""A recorded training batch on disk: ``RUN_DIR/batches/<version>.npz``, so that a run can be replayed.

Plain numpy arrays, never pickled. N tokens of B rows lie end to end, in the order in which the batch was taken:

| array        | dtype, shape      | meaning                                                   |
| ------------ | ----------------- | --------------------------------------------------------- |
| format       | int64 []          | 1                                                         |
| version      | int64 []          | trainer version at which the batch was taken              |
| offsets      | int64 [B + 1]     | row i is tokens offsets[i] to offsets[i + 1]              |
| token_ids    | int32 [N]         | as in ``Trajectory``, likewise the next three             |
| loss_mask    | int32 [N]         |                                                           |
| logprobs     | float32 [N]       |                                                           |
| versions     | int32 [N]         |                                                           |
| returns      | float32 [N]       | 0 for rows that have none                                 |
| has_returns  | bool [B]          |                                                           |
| rewards      | float64 [B]       |                                                           |
| group_ids    | str [B]           |                                                           |
| episode_ids  | str [B]           |                                                           |
"""

from __future__ import annotations

import itertools
import os
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from areal_like.api.trajectory import Trajectory
from areal_like.errors import ArealLikeError

_FORMAT = 1
_TOKEN_ARRAYS = ("token_ids", "loss_mask", "logprobs", "versions")


class BatchFileError(ArealLikeError):
    """A recorded batch is missing, damaged or of another format."""


def batch_path(run_dir: str | Path, version: int) -> Path:
    """Where the batch that was taken at ``version`` is recorded."""
    return Path(run_dir) / "batches" / f"{version:08d}.npz"


def write_batch(run_dir: str | Path, version: int, trajectories: Sequence[Trajectory]) -> Path:
    """Record a batch, in the order of its rows. Written aside and renamed: a reader never sees half a file."""
    path = batch_path(run_dir, version)
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, npt.NDArray[np.generic]] = {
        name: np.concatenate([getattr(t, name) for t in trajectories] or [np.zeros(0, dtype)])
        for name, dtype in zip(_TOKEN_ARRAYS, (np.int32, np.int32, np.float32, np.int32), strict=True)
    }
    returns = [np.zeros(t.length, np.float32) if t.returns is None else t.returns for t in trajectories]
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("wb") as file:
        np.savez(
            file,
            allow_pickle=False,
            format=np.int64(_FORMAT),
            version=np.int64(version),
            offsets=np.cumsum([0, *(t.length for t in trajectories)], dtype=np.int64),
            returns=np.concatenate(returns or [np.zeros(0, np.float32)]),
            has_returns=np.array([t.returns is not None for t in trajectories], np.bool_),
            rewards=np.array([t.reward for t in trajectories], np.float64),
            group_ids=np.array([t.group_id for t in trajectories], np.str_),
            episode_ids=np.array([t.episode_id for t in trajectories], np.str_),
            **arrays,
        )
    aside.replace(path)
    return path


def read_batch(path: str | Path) -> tuple[int, list[Trajectory]]:
    """The version at which a batch was taken, and its rows in order.

    Raises:
        BatchFileError: the file is missing, damaged, or of another format.
    """
    try:
        with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        if int(arrays["format"]) != _FORMAT:
            raise BatchFileError(f"{path}: format {int(arrays['format'])}, but this program reads format {_FORMAT}")
        return int(arrays["version"]), list(_rows(arrays))
    except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise BatchFileError(f"{path}: not a recorded batch: {type(error).__name__}: {error}") from error


def recorded_batches(run_dir: str | Path) -> list[Path]:
    """Every recorded batch of a run, in the order in which they were trained on."""
    return sorted((Path(run_dir) / "batches").glob("[0-9]*.npz"))


def _rows(arrays: dict[str, npt.NDArray[np.generic]]) -> Iterator[Trajectory]:
    offsets = arrays["offsets"].tolist()
    for row, (start, end) in enumerate(itertools.pairwise(offsets)):
        part = slice(start, end)
        yield Trajectory(
            token_ids=arrays["token_ids"][part].astype(np.int32),
            loss_mask=arrays["loss_mask"][part].astype(np.int32),
            logprobs=arrays["logprobs"][part].astype(np.float32),
            versions=arrays["versions"][part].astype(np.int32),
            returns=arrays["returns"][part].astype(np.float32) if arrays["has_returns"][row] else None,
            reward=float(arrays["rewards"][row]),
            group_id=str(arrays["group_ids"][row]),
            episode_id=str(arrays["episode_ids"][row]),
        )
