"""``disk``: one directory of safetensors files per version, complete or absent, never half.

``<directory>/v00000012-i0/`` holds ``weights-00000.safetensors``, … of at most ``bucket_bytes`` each (a larger tensor
has a file of its own) and ``index.json`` (tensor -> file and name there; tensors of equal content lie there once). A
version is written aside, flushed to the disk, then renamed. The last two versions are kept: a server may still stage
the older.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from areal_like.api.weights import Manifest, TensorEntry, TransportKind
from areal_like.errors import WeightUpdateError
from areal_like.weights.checkpoint import StoredTensor, read_header
from areal_like.weights.host_copies import HostCopies
from areal_like.weights.manifest import make_manifest
from areal_like.weights.segments import read_at
from areal_like.weights.snapshot_files import SnapshotFiles
from areal_like.weights.snapshot_folders import aside_of, list_snapshots, snapshot_folder

#: versions that stay on the disk
KEEP_VERSIONS = 2
INDEX_NAME = "index.json"


class DiskWriter:
    """Writes snapshots below one directory, which it owns."""

    def __init__(self, directory: Path, *, bucket_bytes: int, copies: HostCopies | None = None) -> None:
        """``copies``: what takes the tensors through host memory, the writer's own; made to suit without."""
        self._copies = copies or HostCopies()
        self._directory = directory.absolute()
        self._bucket_bytes = bucket_bytes
        self._kept: list[Path] = []

    def write(self, version: int, incarnation: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """See :meth:`WeightWriter.write`."""
        final = snapshot_folder(self._directory, version, incarnation)
        aside = aside_of(final)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            entries = _write_files(aside, tensors, self._bucket_bytes, self._copies)
            manifest = make_manifest(version, incarnation, TransportKind.DISK, str(final), entries)
            shutil.rmtree(final, ignore_errors=True)  # the same version again, after a failed publication
            aside.rename(final)
            _flush(self._directory)
            self._forget_old(final)
        except OSError as error:
            raise WeightUpdateError(f"{final}: writing version {version} failed: {error}") from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return manifest

    def _forget_old(self, newest: Path) -> None:
        self._kept = [path for path in self._kept if path != newest] + [newest]
        for path in list_snapshots(self._directory) - set(self._kept[-KEEP_VERSIONS:]):
            shutil.rmtree(path, ignore_errors=True)
        self._kept = self._kept[-KEEP_VERSIONS:]

    def close(self) -> None:
        """Free the memory; snapshots outlive the writer: whoever knows how the run ended keeps or removes them."""
        self._copies.close()


class DiskReader:
    """Reads one snapshot, straight into its targets. Any number of threads may read."""

    device = torch.device("cpu")
    concurrent = True

    def __init__(self, manifest: Manifest) -> None:
        self._directory = Path(manifest.location)
        self._lock = threading.Lock()
        self._files: dict[str, _File] = {}
        self._open = ExitStack()
        try:
            self._index: dict[str, list[str]] = json.loads((self._directory / INDEX_NAME).read_text())
        except (OSError, ValueError) as error:
            raise WeightUpdateError(
                f"version {manifest.version}: {self._directory} holds no snapshot: {error}; "
                f"only the last {KEEP_VERSIONS} versions are kept"
            ) from error

    def read_into(self, entry: TensorEntry, target: torch.Tensor) -> None:
        """See :meth:`WeightReader.read_into`."""
        if entry.name not in self._index:
            raise WeightUpdateError(f"tensor {entry.name!r} is not in the index of {self._directory}")
        file_name, stored_name = self._index[entry.name]
        try:
            file = self._file(file_name)
            stored = file.tensors[stored_name]
            if (stored.dtype, stored.shape, stored.nbytes) != (entry.dtype, entry.shape, entry.nbytes):
                raise WeightUpdateError(
                    f"tensor {entry.name!r}: {self._directory / file_name} holds {stored.dtype} {stored.shape} in "
                    f"{stored.nbytes} bytes, the manifest says {entry.dtype} {entry.shape} in {entry.nbytes}"
                )
            read_at(file.fd, target.reshape(-1).view(torch.uint8).numpy().data, stored.offset)
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise WeightUpdateError(f"tensor {entry.name!r}: {self._directory / file_name}: {error!r}") from error

    def _file(self, name: str) -> _File:
        with self._lock:
            if name not in self._files:
                if Path(name).name != name:
                    raise WeightUpdateError(f"{self._directory / INDEX_NAME} names a file elsewhere: {name!r}")
                fd = os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC)
                self._open.callback(os.close, fd)
                self._files[name] = _File(fd=fd, tensors=read_header(self._directory / name))
            return self._files[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._open.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A file of the snapshot, open for reading, and what its header says."""

    fd: int
    tensors: Mapping[str, StoredTensor]


def _write_files(
    directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int, copies: HostCopies
) -> tuple[TensorEntry, ...]:
    files = SnapshotFiles(directory, bucket_bytes)
    entries = copies.export(tensors, files)
    index = {entry.name: files.places[entry.digest] for entry in entries}
    path = directory / INDEX_NAME
    path.write_text(json.dumps(index, indent=1))
    _flush(path)
    _flush(directory)
    return entries


def _flush(path: Path) -> None:
    """Make the file or directory survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
