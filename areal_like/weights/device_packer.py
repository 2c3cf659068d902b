"""A packed copy of one version on the trainer's own device, digested there; the trainer may then change its weights.

The chunks (``weights.chunks``) are kept from version to version: a GPU gives up the bytes of the model once, in the
dtype that is served, for as long as the trainer lives. The first version, whose sizes are not known beforehand, takes
one bucket more while it is packed.
"""

from __future__ import annotations

from collections.abc import Iterable
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
        heads: list[tuple[str, torch.dtype, tuple[int, ...], int]] = []
        number = at = 0
        try:
            for name, tensor in tensors:
                flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                heads.append((name, tensor.dtype, tuple(tensor.shape), flat.numel()))
                if flat.numel() == 0:
                    self._digests.add(tensor)
                    continue
                at = self._append(number, at, flat, tensor)
                if at > self.bucket_bytes:
                    self._close(number, at)
                    number, at = number + 1, 0
            if at:
                self._close(number, at)
                number += 1
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

    def _append(self, number: int, at: int, flat: torch.Tensor, tensor: torch.Tensor) -> int:
        """The tensor's bytes ``flat`` at byte ``at`` of bucket ``number``, and the digest of the copy: its end.

        One that lies askew is refused later, all at once; until then its source is digested.
        """
        end = at + flat.numel()
        copy = self._bucket(number, filled=at, needed=end)[at:end]
        copy.copy_(flat)
        askew = at % tensor.element_size() != 0
        self._digests.add(tensor if askew else copy.view(tensor.dtype).view(tensor.shape))
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

    def _close(self, number: int, length: int) -> None:
        """The bucket's last byte is known: no memory behind it is kept."""
        if self._buckets[number].numel() != length:
            self._buckets[number] = self._buckets[number][:length].clone()

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
