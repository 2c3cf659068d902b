"""The safetensors files of one snapshot, byte for byte those of safetensors' own writer. Torch-free."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from areal_like.api.weights import TensorEntry
from areal_like.errors import WeightUpdateError
from areal_like.weights.checkpoint import STORED_NAMES
from areal_like.weights.host_copies import HostCopy, Job
from areal_like.weights.segments import write_at

#: where safetensors' writer puts the tensors of each dtype
_RANK = {dtype: rank for rank, dtype in enumerate(STORED_NAMES)}
_Placed = tuple[HostCopy, TensorEntry]


class SnapshotFiles:
    """The medium of one snapshot: ``directory`` gets files of at most ``bucket_bytes``; a larger tensor has its own.

    ``places``: file, and name there, of each content by its digest.
    """

    collects = True

    def __init__(self, directory: Path, bucket_bytes: int) -> None:
        self._directory = directory
        self._bucket_bytes = bucket_bytes
        self._waiting: list[_Placed] = []
        self._waiting_bytes = 0
        self._files = 0
        self.places: dict[str, tuple[str, str]] = {}

    def place(self, copy: HostCopy, entry: TensorEntry) -> tuple[Job, ...]:
        """See :meth:`Medium.place`.

        Raises:
            WeightUpdateError: its dtype cannot travel.
        """
        if entry.dtype not in STORED_NAMES:
            raise WeightUpdateError(
                f"tensor {entry.name!r} has dtype {entry.dtype!r}, which cannot travel; "
                f"known are {', '.join(STORED_NAMES)}"
            )
        if entry.digest in self.places:
            copy.release()
            return ()
        full = self._waiting and self._waiting_bytes + entry.nbytes > self._bucket_bytes
        jobs = self.finish() if full else ()
        self._waiting.append((copy, entry))
        self._waiting_bytes += entry.nbytes
        self.places[entry.digest] = (self._name(), entry.name)
        return jobs

    def finish(self) -> tuple[Job, ...]:
        """See :meth:`Medium.finish`."""
        if not self._waiting:
            return ()
        job = partial(_write_file, self._directory / self._name(), self._waiting)
        self._waiting = []
        self._waiting_bytes = 0
        self._files += 1
        return (job,)

    def _name(self) -> str:
        return f"weights-{self._files:05d}.safetensors"


def _write_file(path: Path, content: Sequence[_Placed]) -> None:
    """One whole file, flushed to the disk."""
    ordered = sorted(content, key=lambda placed: (_RANK[placed[1].dtype], placed[1].name))
    head = _head([entry for _, entry in ordered])
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        write_at(fd, memoryview(head), 0)
        position = len(head)
        for copy, entry in ordered:
            for part in copy.parts:
                write_at(fd, part.data, position + part.start)
                part.release()
            position += entry.nbytes
        os.fsync(fd)
    finally:
        os.close(fd)


def _head(entries: Sequence[TensorEntry]) -> bytes:
    """Length, and JSON padded to a multiple of eight, of tensors that follow in this order."""
    header: dict[str, dict[str, Any]] = {}
    end = 0
    for entry in entries:
        offsets = [end, end + entry.nbytes]
        header[entry.name] = {"dtype": STORED_NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        end += entry.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
