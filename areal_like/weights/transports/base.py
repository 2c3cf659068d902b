"""The two ends of a transport, and how to get one by kind."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch

from areal_like.api.weights import Manifest, TensorEntry, TransportKind
from areal_like.weights.manifest import check_manifest

#: bytes of one bucket unless the experiment says otherwise
DEFAULT_BUCKET_BYTES = 64 * 2**20


class WeightWriter(Protocol):
    """The trainer's end (rank 0)."""

    def write(self, version: int, incarnation: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """Lay ``tensors`` out for every server and say where. Takes them one at a time; never holds the model.

        The bytes of the version before stay readable until the next call; older ones may be overwritten.

        Raises:
            WeightUpdateError: the medium is full or gone, or the tensors make no legal manifest.
        """
        ...

    def close(self) -> None:
        """Free what belongs to the writer. Idempotent."""
        ...


class WeightReader(Protocol):
    """A server's end. A context manager; reads private copies, so nothing changes under the caller's hands."""

    def read_into(self, entry: TensorEntry, target: torch.Tensor) -> None:
        """Fill ``target`` (contiguous, on the CPU, of the entry's dtype and shape) with the entry's bytes.

        The bytes are not verified: digest the copy.

        Raises:
            WeightUpdateError: they are gone, cut short, or belong to another version by now.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def make_writer(
    kind: TransportKind,
    *,
    run_id: str,
    directory: Path,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    host: str = "127.0.0.1",
    group: str = "gloo",
) -> WeightWriter:
    """The trainer's end of transport ``kind``.

    Args:
        run_id: names shared-memory segments (shm), so that the launcher can find leftovers.
        directory: where snapshots are written (disk).
        bucket_bytes: size of a transfer bucket (shm, collective) or of a snapshot's file (disk).
        host: address at which the servers reach this process (collective).
        group: gloo, or nccl where this process and every server have GPUs of their own (collective).
    """
    if kind is TransportKind.DISK:
        from areal_like.weights.transports.disk import DiskWriter

        return DiskWriter(directory, bucket_bytes=bucket_bytes)
    if kind is TransportKind.COLLECTIVE:
        from areal_like.weights.transports.collective import CollectiveWriter

        return CollectiveWriter(host=host, bucket_bytes=bucket_bytes, backend=group)
    from areal_like.weights.transports.shm import ShmWriter

    return ShmWriter(run_id, bucket_bytes=bucket_bytes)


def make_reader(manifest: Manifest) -> WeightReader:
    """A server's end for one manifest.

    Raises:
        WeightUpdateError: the manifest contradicts itself, or what it describes is gone or was overwritten.
    """
    check_manifest(manifest)
    if manifest.transport is TransportKind.DISK:
        from areal_like.weights.transports.disk import DiskReader

        return DiskReader(manifest)
    if manifest.transport is TransportKind.COLLECTIVE:
        from areal_like.weights.transports.collective import CollectiveReader

        return CollectiveReader(manifest)
    from areal_like.weights.transports.shm import ShmReader

    return ShmReader(manifest)
