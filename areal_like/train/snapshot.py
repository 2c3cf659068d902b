"""What training needs to go on: weights, moments, counters and random state, sharded, written beside the next step.

    <root>/version-000012/    .metadata, one file a rank (torch.distributed.checkpoint)
    <root>/.version-000012    being written; never read

A snapshot holds whole tensors by name, whatever ranks wrote it, so another number of ranks reads it as well.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import async_save

from areal_like.errors import ConfigError
from areal_like.train.engine import TrainEngine
from areal_like.train.parallel import Parallel

_NAME = re.compile(r"version-(\d{6,})")
#: keys that a snapshot of another kind of device may lack
_OPTIONAL = ("random/",)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotStatistics:
    """``waiting`` is the version that is being written, or None."""

    saved: int
    waiting: int | None


class SnapshotStore:
    """The newest ``keep`` snapshots under ``root``. Every method but the last two is collective.

    ``engines``: by name, such as policy and critic. One snapshot is written at a time; the ranks agree on it in a
    group of their own, so that training's collectives go on meanwhile.
    """

    def __init__(self, root: Path, engines: Mapping[str, TrainEngine], parallel: Parallel, *, keep: int = 2) -> None:
        if keep < 1:
            raise ConfigError(f"snapshots: at least one must be kept, got keep={keep}")
        self._root = root
        self._engines = dict(engines)
        self._parallel = parallel
        self._keep = keep
        self._group = dist.new_group(backend="gloo")
        self._writing: tuple[int, Future[Any]] | None = None
        self._saved = 0

    def save(self, version: int) -> Path:
        """Copy the state as it is now and write it in the background; returns where it will be.

        Waits for the snapshot before it, and raises what that one raised.
        """
        self.finish()
        folder = self._root / f"version-{version:06d}"
        aside = self._root / f".{folder.name}"
        if self._parallel.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        dist.barrier(group=self._group)
        writer = FileSystemWriter(aside, sync_files=True)
        copied = async_save(self._state(version), storage_writer=writer, process_group=self._group)
        assert isinstance(copied, Future)
        self._writing = (version, copied)
        return folder

    def finish(self) -> None:
        """Wait until the last snapshot is complete under its name, and drop what is too old."""
        if self._writing is None:
            return
        version, writing = self._writing
        self._writing = None
        writing.result()  # every rank's files are complete when rank 0 has this
        if self._parallel.rank == 0:
            self._publish(version)
        dist.barrier(group=self._group)
        self._saved += 1

    def load(self, folder: Path) -> int:
        """Put the state of ``folder`` into the engines; returns its version.

        Raises:
            ConfigError: it is no snapshot, or one of other tensors.
        """
        state = self._state(0)
        try:
            reader = FileSystemReader(folder)
            held = reader.read_metadata().state_dict_metadata
        except (OSError, EOFError) as error:
            raise ConfigError(
                f"snapshot {folder}: cannot be read ({error}); give a folder named version-..."
            ) from error
        missing = [key for key in state if key not in held and not key.startswith(_OPTIONAL)]
        if missing:
            raise ConfigError(
                f"snapshot {folder}: holds no {missing[0]!r} ({len(missing)} tensors are missing); "
                "it was written by another model or without a critic"
            )
        wanted = {key: value for key, value in state.items() if key in held}
        try:
            load_state(wanted, storage_reader=reader, process_group=self._group)
        except CheckpointException as error:
            raise ConfigError(f"snapshot {folder}: its tensors do not fit this model: {error}") from error
        for name, engine in self._engines.items():
            engine.adopt({key.removeprefix(f"{name}/"): v for key, v in wanted.items() if key.startswith(f"{name}/")})
        _set_random_state(wanted)
        return int(wanted["run/version"])

    def latest(self) -> Path | None:
        """The complete snapshot with the highest version."""
        return max(self._complete(), key=_version_of, default=None)

    def statistics(self) -> SnapshotStatistics:
        return SnapshotStatistics(saved=self._saved, waiting=self._writing[0] if self._writing else None)

    def _state(self, version: int) -> dict[str, Any]:
        """Every tensor by ``<engine>/<name>``; sharded ones share the engine's memory."""
        state: dict[str, Any] = {"run/version": torch.tensor(version), "random/cpu": torch.get_rng_state()}
        if self._parallel.device.type == "cuda":
            state["random/cuda"] = torch.cuda.get_rng_state(self._parallel.device)
        for name, engine in self._engines.items():
            state |= {f"{name}/{key}": value for key, value in engine.state().items()}
        return state

    def _publish(self, version: int) -> None:
        folder = self._root / f"version-{version:06d}"
        aside = self._root / f".{folder.name}"
        _flush(aside)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        _flush(self._root)
        for old in sorted(self._complete(), key=_version_of)[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)

    def _complete(self) -> list[Path]:
        if not self._root.is_dir():
            return []
        return [path for path in self._root.iterdir() if _NAME.fullmatch(path.name) and (path / ".metadata").is_file()]


def _version_of(folder: Path) -> int:
    found = _NAME.fullmatch(folder.name)
    assert found is not None
    return int(found[1])


def _set_random_state(state: Mapping[str, Tensor]) -> None:
    if "random/cpu" in state:
        torch.set_rng_state(state["random/cpu"])
    if "random/cuda" in state:
        torch.cuda.set_rng_state(state["random/cuda"])


def _flush(path: Path) -> None:
    """Make a rename survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
