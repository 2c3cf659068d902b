"""A packed copy of one version on the trainer's own device, digested there; the trainer may then change its weights.

The chunks (``weights.chunks``) are kept from version to version: a GPU gives up the bytes of the model once, in the
dtype that is served, for as long as the trainer lives. The first version, whose sizes are not known beforehand, takes
one bucket more while it is packed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from areal_like.api.weights import TensorEntry
from areal_like.errors import WeightUpdateError
from areal_like.weights.chunks import Chunk, check_alignment, plan_chunks
from areal_like.weights.device_digest import DeviceDigests
from areal_like.weights.digest import dtype_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One version: chunk k of ``chunks`` lies in ``buckets[k]``, uint8 and exactly as long."""

    entries: tuple[TensorEntry, ...]
    chunks: tuple[Chunk, ...]
    buckets: tuple[torch.Tensor, ...]


#: name, dtype, shape and bytes of a tensor
_Head = tuple[str, torch.dtype, tuple[int, ...], int]


class DevicePacker:
    """Packs versions of one model, one after the other, into the same memory."""

    def __init__(self, device: torch.device, bucket_bytes: int) -> None:
        self._device = device
        self.bucket_bytes = bucket_bytes
        self._digests = DeviceDigests(device)
        self._buckets: list[torch.Tensor] = []

    def pack(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Packed:
        """Copy ``tensors`` and digest the copies. The bytes of the version before are gone with the first tensor.

        Waits for the device once, at the end: then the copy is whole, and the sources may change.

        Raises:
            WeightUpdateError: the copy does not fit into the device's memory, or a tensor cannot lie in a chunk.
        """
        heads: list[_Head] = []
        number = at = digested = 0
        try:
            for name, tensor in tensors:
                flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                heads.append((name, tensor.dtype, tuple(tensor.shape), flat.numel()))
                if flat.numel():
                    at = self._append(number, at, flat)
                if at > self.bucket_bytes:
                    self._close(number, at, heads[digested:])
                    number, at, digested = number + 1, 0, len(heads)
            self._close(number, at, heads[digested:])
            number += bool(at)
            digests = self._digests.read()
        except torch.OutOfMemoryError as error:
            told = self._no_room(sum(head[3] for head in heads))
            self._buckets.clear()  # the trainer needs its memory more than a copy that is not whole
            raise WeightUpdateError(told) from error
        finally:
            self._digests.read()  # what a failure left behind
        del self._buckets[number:]
        entries = tuple(
            TensorEntry(name=name, dtype=dtype_name(dtype), shape=shape, nbytes=nbytes, digest=digest)
            for (name, dtype, shape, nbytes), digest in zip(heads, digests, strict=True)
        )
        chunks = plan_chunks([entry.nbytes for entry in entries], self.bucket_bytes)
        check_alignment(entries, chunks)
        buckets = tuple(self._buckets) + tuple(self._empty(0) for _ in chunks[number:])
        return Packed(entries=entries, chunks=chunks, buckets=buckets)

    def _append(self, number: int, at: int, flat: torch.Tensor) -> int:
        """A tensor's bytes ``flat`` at byte ``at`` of bucket ``number``: their end."""
        end = at + flat.numel()
        self._bucket(number, filled=at, needed=end)[at:end].copy_(flat)
        return end

    def _bucket(self, number: int, *, filled: int, needed: int) -> torch.Tensor:
        """Bucket ``number``, with room for ``needed`` bytes; its first ``filled`` bytes stay."""
        if number == len(self._buckets):
            self._buckets.append(self._empty(max(needed, self.bucket_bytes)))
        elif self._buckets[number].numel() < needed:
            grown = self._empty(needed)
            grown[:filled].copy_(self._buckets[number][:filled])
            self._buckets[number] = grown
        return self._buckets[number]

    def _close(self, number: int, length: int, heads: Sequence[_Head]) -> None:
        """The bucket's last byte is known: no memory behind it is kept, and what lies in it is digested."""
        if length and self._buckets[number].numel() != length:
            self._buckets[number] = self._buckets[number][:length].clone()
        bucket = self._buckets[number] if length else self._empty(0)
        self._digests.add(*_views(bucket, heads))

    def _empty(self, length: int) -> torch.Tensor:
        return torch.empty(length, dtype=torch.uint8, device=self._device)

    def _no_room(self, nbytes: int) -> str:
        free, total = torch.cuda.mem_get_info(self._device)
        held = sum(bucket.numel() for bucket in self._buckets)
        return (
            f"the packed copy of the weights does not fit on {self._device}: {held >> 20} MiB of it lie there, "
            f"{nbytes >> 20} MiB were to be packed so far, {free >> 20} of {total >> 20} MiB are free; weights between "
            "GPUs keep one copy of the model there. Lower actor.mb_spec.max_tokens_per_mb, shard the trainer over more "
            "GPUs, or use weights.transport=shm"
        )


def _views(bucket: torch.Tensor, heads: Sequence[_Head]) -> Iterator[torch.Tensor]:
    """The tensors that lie in ``bucket`` one after the other. One that lies askew stays bytes: it is refused later."""
    at = 0
    for _, dtype, shape, nbytes in heads:
        part = bucket[at : at + nbytes]
        askew = at % dtype.itemsize != 0
        if nbytes:
            yield part if askew else part.view(dtype).view(shape)
        else:
            yield torch.empty(shape, dtype=dtype, device=bucket.device)
        at += nbytes
