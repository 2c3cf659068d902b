"""The two ends of a transport, and how to get one by kind."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch

from areal_like.api.weights import Manifest, TensorEntry, TransportKind
from areal_like.errors import WeightUpdateError
from areal_like.weights.device_digest import is_device_digest
from areal_like.weights.manifest import check_manifest

#: bytes of one bucket unless the experiment says otherwise: through host memory...
DEFAULT_BUCKET_BYTES = 64 * 2**20
#: ...and between GPUs, where each costs a fraction of a millisecond, the first and the last are not overlapped with
#: loading, and a server needs room for two to three
DEFAULT_DEVICE_BUCKET_BYTES = 512 * 2**20
#: seconds until all members of a group between GPUs have joined it
_JOIN_TIMEOUT = 60.0


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

    @property
    def device(self) -> torch.device:
        """Where targets lie at best: the CPU, or the GPU that the bytes come to."""
        ...

    @property
    def concurrent(self) -> bool:
        """``read_into`` may be called from several threads at once, and in any order."""
        ...

    def read_into(self, entry: TensorEntry, target: torch.Tensor) -> None:
        """Fill ``target`` (contiguous, on ``device``, of the entry's dtype and shape) with the entry's bytes.

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
    bucket_bytes: int | None = None,
    host: str = "127.0.0.1",
    group: str = "gloo",
    stall: float = 10.0,
) -> WeightWriter:
    """The trainer's end of transport ``kind``.

    Args:
        run_id: names shared-memory segments (shm), so that the launcher can find leftovers.
        directory: where snapshots are written (disk).
        bucket_bytes: size of a transfer bucket (shm, collective, ipc) or of a snapshot's file (disk); None: what suits.
        host: address at which the servers reach this process (collective).
        group: gloo, or nccl where this process and every server have GPUs of their own (collective).
        stall: seconds without progress after which a member of a transfer counts as lost (nccl).

    Raises:
        WeightUpdateError: the transport needs a GPU, and this process has none.
    """
    between_gpus = kind is TransportKind.IPC or (kind is TransportKind.COLLECTIVE and group == "nccl")
    size = bucket_bytes or (DEFAULT_DEVICE_BUCKET_BYTES if between_gpus else DEFAULT_BUCKET_BYTES)
    if kind is TransportKind.DISK:
        from areal_like.weights.transports.disk import DiskWriter

        return DiskWriter(directory, bucket_bytes=size)
    if kind is TransportKind.IPC:
        from areal_like.weights.transports.ipc import IpcWriter

        return IpcWriter(bucket_bytes=size, device=current_gpu())
    if between_gpus:
        from areal_like.weights.nccl import NcclGroups
        from areal_like.weights.transports.nccl import NcclWriter

        gpu = current_gpu()
        groups = NcclGroups(gpu, timeout=_JOIN_TIMEOUT)
        return NcclWriter(host=host, bucket_bytes=size, groups=groups, device=gpu, stall=stall)
    if kind is TransportKind.COLLECTIVE:
        from areal_like.weights.transports.collective import CollectiveWriter

        return CollectiveWriter(host=host, bucket_bytes=size)
    from areal_like.weights.transports.shm import ShmWriter

    return ShmWriter(run_id, bucket_bytes=size)


def make_reader(manifest: Manifest) -> WeightReader:
    """A server's end for one manifest.

    Raises:
        WeightUpdateError: the manifest contradicts itself, or what it describes is gone or was overwritten.
    """
    check_manifest(manifest)
    if manifest.transport is TransportKind.DISK:
        from areal_like.weights.transports.disk import DiskReader

        return DiskReader(manifest)
    if manifest.transport is TransportKind.IPC:
        from areal_like.weights.transports.ipc import IpcReader

        return IpcReader(manifest, current_gpu())
    if manifest.transport is TransportKind.COLLECTIVE:
        return _collective_reader(manifest)
    from areal_like.weights.transports.shm import ShmReader

    return ShmReader(manifest)


def _collective_reader(manifest: Manifest) -> WeightReader:
    from areal_like.weights.transports.meeting import Meeting

    if Meeting.parse(manifest.location).backend == "nccl":
        from areal_like.weights.nccl import NcclGroups
        from areal_like.weights.transports.nccl_reader import NcclReader
        from areal_like.weights.transports.seat import Membership

        gpu = current_gpu()
        return NcclReader(manifest, Membership(NcclGroups(gpu, timeout=_JOIN_TIMEOUT), gpu))
    from areal_like.weights.transports.collective import CollectiveReader

    return CollectiveReader(manifest)


def stays_on_gpus(manifest: Manifest) -> bool:
    """Its bytes go from GPU to GPU, and have digests of that kind."""
    return bool(manifest.tensors) and is_device_digest(manifest.tensors[0].digest)


def current_gpu() -> torch.device:
    """The calling thread's.

    Raises:
        WeightUpdateError: this process has none.
    """
    if not torch.cuda.is_available():
        raise WeightUpdateError(
            "this process has no GPU, and the weights are to come from one; use weights.transport=shm"
        )
    return torch.device("cuda", torch.cuda.current_device())
