"""``collective`` over NCCL, for engines that stage beside their live weights: everything is received while staging."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch

from areal_like.api.weights import Manifest, TensorEntry
from areal_like.weights.chunks import chunk_places, plan_chunks
from areal_like.weights.nccl import Group
from areal_like.weights.transports.nccl import side_stream
from areal_like.weights.transports.seat import Membership, Seat


class NcclReader:
    """A server's end for one version. It holds the whole version on the GPU until it is closed."""

    concurrent = False

    def __init__(self, manifest: Manifest, membership: Membership) -> None:
        """Receives; the group lasts for this version. Raises WeightUpdateError."""
        self.device = membership.device
        self._membership = membership
        seat = Seat(manifest, membership)
        chunks = plan_chunks([entry.nbytes for entry in manifest.tensors], seat.bucket_bytes)
        self._buckets = [torch.empty(chunk.nbytes, dtype=torch.uint8, device=self.device) for chunk in chunks]
        self._places = chunk_places(manifest.tensors, chunks)
        try:
            seat.prepare()
            seat.receive(self._take)
        except BaseException:
            seat.leave()
            membership.leave()
            raise

    def _take(self, group: Group) -> None:
        with side_stream(self.device):
            for bucket in self._buckets:
                group.broadcast(bucket, src=0)

    def read_into(self, entry: TensorEntry, target: torch.Tensor) -> None:
        """See :meth:`WeightReader.read_into`; ``target`` may lie on the GPU."""
        number, offset = self._places[entry.name]
        target.reshape(-1).view(torch.uint8).copy_(self._buckets[number][offset : offset + entry.nbytes])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._buckets.clear()
        self._membership.leave()
