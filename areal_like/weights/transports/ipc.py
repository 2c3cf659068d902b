"""``ipc``: trainer and servers share one GPU; a server copies straight out of the trainer's packed copy (CUDA IPC).

The manifest's location holds the handles of the buckets as JSON: numbers, and bytes in base64. Nothing is unpickled;
but a handle opens memory of the trainer, so this transport is for loopback, and only where it was asked for.

The buckets stay where they are from version to version, and so do their handles. A server maps them while it stages
and lets go once it has copied; one that comes too late reads a mixture, which the digests tell.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

import torch

from areal_like.api.weights import Manifest, TensorEntry, TransportKind
from areal_like.errors import WeightUpdateError
from areal_like.weights.chunks import chunk_places, plan_chunks
from areal_like.weights.device_packer import DevicePacker
from areal_like.weights.manifest import make_manifest
from areal_like.weights.transports.rounds import own_host

#: where the arguments of torch's ``rebuild_cuda_tensor`` say on which device the receiver looks at the memory
_DEVICE_ARGUMENT = 6
#: how many there are, from torch 2.11 to 2.13
_ARGUMENTS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketHandle:
    """One bucket (uint8 [nbytes]) in another process's GPU memory: a handle of its allocation, and where in it."""

    nbytes: int
    tensor_offset: int
    device: int
    handle: bytes
    storage_bytes: int
    storage_offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_needed: bool

    @classmethod
    def of_arguments(cls, arguments: Sequence[Any], nbytes: int) -> BucketHandle:
        """Of what ``torch.multiprocessing.reductions.reduce_tensor`` says of a bucket."""
        if len(arguments) != _ARGUMENTS:
            raise WeightUpdateError(f"this torch describes shared tensors by {len(arguments)} values, not {_ARGUMENTS}")
        return cls(
            nbytes=nbytes,
            tensor_offset=int(arguments[3]),
            device=int(arguments[6]),
            handle=bytes(arguments[7]),
            storage_bytes=int(arguments[8]),
            storage_offset=int(arguments[9]),
            counter=bytes(arguments[11]),
            counter_offset=int(arguments[12]),
            event=bytes(arguments[13]),
            event_needed=bool(arguments[14]),
        )

    @classmethod
    def of_nothing(cls) -> BucketHandle:
        """Of a bucket without bytes: CUDA has no handle for it."""
        return cls(
            nbytes=0, tensor_offset=0, device=0, handle=b"", storage_bytes=0, storage_offset=0, counter=b"",
            counter_offset=0, event=b"", event_needed=False,
        )  # fmt: skip

    def arguments(self) -> tuple[Any, ...]:
        """Those of ``rebuild_cuda_tensor``; the inverse of :meth:`of_arguments`. Of a bucket that has bytes."""
        return (
            torch.Tensor, torch.Size([self.nbytes]), (1,), self.tensor_offset, torch.storage.TypedStorage, torch.uint8,
            self.device, self.handle, self.storage_bytes, self.storage_offset, False, self.counter,
            self.counter_offset, self.event, self.event_needed,
        )  # fmt: skip

    def open(self, device: torch.device) -> torch.Tensor:
        """The memory, mapped into this process. Raises WeightUpdateError where it is gone."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        if not self.nbytes:
            return torch.empty(0, dtype=torch.uint8, device=device)
        arguments = list(self.arguments())
        arguments[_DEVICE_ARGUMENT] = device.index or 0
        try:
            opened: torch.Tensor = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise WeightUpdateError(f"the trainer's GPU memory cannot be opened: {error}; does it live?") from error
        return opened

    def to_json(self) -> dict[str, Any]:
        return {
            name: base64.b64encode(value).decode() if isinstance(value, bytes) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> BucketHandle:
        """Raises KeyError, TypeError or ValueError for what is no handle."""
        return cls(
            nbytes=int(found["nbytes"]),
            tensor_offset=int(found["tensor_offset"]),
            device=int(found["device"]),
            handle=base64.b64decode(found["handle"], validate=True),
            storage_bytes=int(found["storage_bytes"]),
            storage_offset=int(found["storage_offset"]),
            counter=base64.b64decode(found["counter"], validate=True),
            counter_offset=int(found["counter_offset"]),
            event=base64.b64decode(found["event"], validate=True),
            event_needed=bool(found["event_needed"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBuckets:
    """A manifest's location: the GPU and host where the buckets lie, how they are cut, and their handles."""

    gpu: str
    host: str
    bucket_bytes: int
    buckets: tuple[BucketHandle, ...]

    def location(self) -> str:
        told = {"gpu": self.gpu, "host": self.host, "bucket_bytes": self.bucket_bytes}
        return json.dumps({**told, "buckets": [handle.to_json() for handle in self.buckets]}, separators=(",", ":"))

    @classmethod
    def parse(cls, location: str) -> SharedBuckets:
        """The inverse of :meth:`location`.

        Raises:
            WeightUpdateError: it is no location of this transport.
        """
        try:
            found = json.loads(location)
            return cls(
                gpu=str(found["gpu"]),
                host=str(found["host"]),
                bucket_bytes=int(found["bucket_bytes"]),
                buckets=tuple(BucketHandle.from_json(handle) for handle in found["buckets"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise WeightUpdateError(f"{location[:80]!r}... is no location of the ipc transport: {error!r}") from error

    def check_gpu(self, gpu: str) -> None:
        """Raise WeightUpdateError unless the memory lies on ``gpu`` (its UUID) of this host."""
        if (self.host, self.gpu) != (own_host(), gpu):
            raise WeightUpdateError(
                f"weights.transport=ipc: the trainer's copy lies on GPU {self.gpu} of {self.host}, this server "
                f"computes on {gpu} of {own_host()}; both must share one GPU: use collective or shm"
            )


def gpu_name(device: torch.device) -> str:
    """The GPU's UUID, as vLLM calls it too."""
    return str(torch.cuda.get_device_properties(device).uuid)


class IpcWriter:
    """The trainer's end (rank 0). Keeps one packed copy of the model on its GPU."""

    def __init__(
        self,
        *,
        bucket_bytes: int,
        device: torch.device,
        share: Callable[[torch.Tensor], BucketHandle] | None = None,
        name: str | None = None,
    ) -> None:
        """``share`` and ``name`` stand in for CUDA's, where there is none."""
        self._packer = DevicePacker(device, bucket_bytes)
        self._share = share or share_bucket
        self._gpu = name or gpu_name(device)
        self._handles: dict[tuple[int, int], BucketHandle] = {}

    def write(self, version: int, incarnation: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """See :meth:`WeightWriter.write`. The version before is gone."""
        packed = self._packer.pack(tensors)
        keys = [(bucket.data_ptr(), bucket.numel()) for bucket in packed.buckets]
        for key, bucket in zip(keys, packed.buckets, strict=True):
            if key not in self._handles:
                self._handles[key] = self._share(bucket) if bucket.numel() else BucketHandle.of_nothing()
        self._handles = {key: self._handles[key] for key in keys}
        shared = SharedBuckets(
            gpu=self._gpu,
            host=own_host(),
            bucket_bytes=self._packer.bucket_bytes,
            buckets=tuple(self._handles[key] for key in keys),
        )
        return make_manifest(version, incarnation, TransportKind.IPC, shared.location(), packed.entries)

    def close(self) -> None:
        """The memory goes with the process: servers may still look at it.

        Torch says "Producer process has been terminated before all shared CUDA tensors released" where one was killed
        while it did, or does so at the end: its count of readers is never put right then, and nobody needs it.
        """


def share_bucket(bucket: torch.Tensor) -> BucketHandle:
    """A handle that other processes of this host can open."""
    from torch.multiprocessing.reductions import reduce_tensor

    return BucketHandle.of_arguments(reduce_tensor(bucket)[1], bucket.numel())  # type: ignore[no-untyped-call]


class IpcReader:
    """A server's end for one version: copies on the GPU."""

    concurrent = False

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        shared = SharedBuckets.parse(manifest.location)
        shared.check_gpu(gpu_name(device))
        self.device = device
        self._buckets = [handle.open(device) for handle in shared.buckets]
        chunks = plan_chunks([entry.nbytes for entry in manifest.tensors], shared.bucket_bytes)
        self._places = chunk_places(manifest.tensors, chunks)

    def read_into(self, entry: TensorEntry, target: torch.Tensor) -> None:
        """See :meth:`WeightReader.read_into`; ``target`` may lie on the GPU."""
        number, offset = self._places[entry.name]
        target.reshape(-1).view(torch.uint8).copy_(self._buckets[number][offset : offset + entry.nbytes])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.cuda.current_stream(self.device).synchronize()
        self._buckets.clear()
