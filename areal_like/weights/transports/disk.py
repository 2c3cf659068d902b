"""``disk``: one directory of safetensors files per version, complete or absent, never half.

``<directory>/v00000012-i0/`` holds ``weights-00000.safetensors``, … of at most ``bucket_bytes`` each (a larger tensor
has a file of its own) and ``index.json`` (tensor -> file and name there; tensors of equal content lie there once). A
version is written aside, flushed to the disk, then renamed. The last two versions are kept: a server may still stage
the older.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from areal_like.api.weights import Manifest, TensorEntry, TransportKind
from areal_like.errors import WeightUpdateError
from areal_like.weights.digest import tensor_entry
from areal_like.weights.manifest import make_manifest

#: versions that stay on the disk
KEEP_VERSIONS = 2
INDEX_NAME = "index.json"
_ASIDE = ".writing-"
#: directories that this module made, finished or not; nothing else is ever removed
_SNAPSHOT = re.compile(rf"({re.escape(_ASIDE)})?v\d{{8,}}-i\d+")


class DiskWriter:
    """Writes snapshots below one directory, which it owns."""

    def __init__(self, directory: Path, *, bucket_bytes: int) -> None:
        self._directory = directory.absolute()
        self._bucket_bytes = bucket_bytes
        self._kept: list[Path] = []

    def write(self, version: int, incarnation: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """See :meth:`WeightWriter.write`."""
        final = self._directory / f"v{version:08d}-i{incarnation}"
        aside = self._directory / f"{_ASIDE}{final.name}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            entries = _write_files(aside, tensors, self._bucket_bytes)
            manifest = make_manifest(version, incarnation, TransportKind.DISK, str(final), entries)
            shutil.rmtree(final, ignore_errors=True)  # the same version again, after a failed publication
            aside.rename(final)
            _flush(self._directory)
            self._forget_old(final)
        except (OSError, SafetensorError) as error:
            raise WeightUpdateError(f"{final}: writing version {version} failed: {error}") from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return manifest

    def _forget_old(self, newest: Path) -> None:
        self._kept = [path for path in self._kept if path != newest] + [newest]
        ours = {path for path in self._directory.iterdir() if _SNAPSHOT.fullmatch(path.name)}
        for path in ours - set(self._kept[-KEEP_VERSIONS:]):
            shutil.rmtree(path, ignore_errors=True)
        self._kept = self._kept[-KEEP_VERSIONS:]

    def close(self) -> None:
        """Snapshots outlive the writer: nothing to free."""


class DiskReader:
    """Reads one snapshot."""

    device = torch.device("cpu")

    def __init__(self, manifest: Manifest) -> None:
        self._directory = Path(manifest.location)
        self._files: dict[str, Any] = {}
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
            stored = self._file(file_name).get_tensor(stored_name)
        except (OSError, SafetensorError) as error:
            raise WeightUpdateError(f"tensor {entry.name!r}: {self._directory / file_name}: {error}") from error
        if stored.dtype != target.dtype or stored.shape != target.shape:
            raise WeightUpdateError(
                f"tensor {entry.name!r}: {self._directory / file_name} holds {stored.dtype} {tuple(stored.shape)}, "
                f"the manifest says {entry.dtype} {entry.shape}"
            )
        target.copy_(stored)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            if Path(name).name != name:
                raise WeightUpdateError(f"{self._directory / INDEX_NAME} names a file elsewhere: {name!r}")
            opened = safe_open(self._directory / name, framework="pt", device="cpu")
            self._files[name] = self._open.enter_context(opened)
        return self._files[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._open.close()


class _Shard:
    """Tensors waiting to be written into one file; holds private copies, since the exporter reuses its buffer."""

    def __init__(self, directory: Path, bucket_bytes: int) -> None:
        self._directory = directory
        self._bucket_bytes = bucket_bytes
        self._waiting: dict[str, torch.Tensor] = {}
        self._waiting_bytes = 0
        self._files = 0

    def add(self, entry: TensorEntry, tensor: torch.Tensor) -> str:
        """Queue a tensor; return the name of the file that will hold it."""
        if self._waiting and self._waiting_bytes + entry.nbytes > self._bucket_bytes:
            self.flush()
        self._waiting[entry.name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._waiting_bytes += entry.nbytes
        return self._name()

    def flush(self) -> None:
        if not self._waiting:
            return
        path = self._directory / self._name()
        save_file(self._waiting, path)
        _flush(path)
        self._waiting = {}
        self._waiting_bytes = 0
        self._files += 1

    def _name(self) -> str:
        return f"weights-{self._files:05d}.safetensors"


def _write_files(
    directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
) -> tuple[TensorEntry, ...]:
    shard = _Shard(directory, bucket_bytes)
    entries: list[TensorEntry] = []
    index: dict[str, tuple[str, str]] = {}
    placed: dict[str, tuple[str, str]] = {}
    for name, tensor in tensors:
        entry = tensor_entry(name, tensor)
        entries.append(entry)
        if entry.digest not in placed:
            placed[entry.digest] = (shard.add(entry, tensor), name)
        index[name] = placed[entry.digest]
    shard.flush()
    path = directory / INDEX_NAME
    path.write_text(json.dumps(index, indent=1))
    _flush(path)
    _flush(directory)
    return tuple(entries)


def _flush(path: Path) -> None:
    """Make the file or directory survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
