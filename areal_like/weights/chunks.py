"""How tensors are cut into the chunks of a packed broadcast. Pure arithmetic on sizes; no bytes, no torch.

It is the rule of vLLM's packed consumer (``vllm/distributed/weight_transfer/packed_tensor.py``, 0.26 to 0.32): tensors
lie one after the other without gaps; a chunk ends with the tensor that takes it *beyond* ``bucket_bytes``; none is
split. Both sides derive the same cuts from the same sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from areal_like.api.weights import TensorEntry
from areal_like.errors import WeightUpdateError
from areal_like.weights.manifest import ITEM_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tensors ``first`` .. ``last`` - 1 of the manifest; ``offsets`` of each in the chunk, and its length in bytes."""

    first: int
    last: int
    offsets: tuple[int, ...]
    nbytes: int


def plan_chunks(sizes: Iterable[int], bucket_bytes: int) -> tuple[Chunk, ...]:
    """The chunks of tensors of ``sizes`` bytes, in order."""
    chunks: list[Chunk] = []
    offsets: list[int] = []
    first = nbytes = 0
    for size in sizes:
        offsets.append(nbytes)
        nbytes += size
        if nbytes > bucket_bytes:
            chunks.append(Chunk(first=first, last=first + len(offsets), offsets=tuple(offsets), nbytes=nbytes))
            first, offsets, nbytes = first + len(offsets), [], 0
    if offsets:
        chunks.append(Chunk(first=first, last=first + len(offsets), offsets=tuple(offsets), nbytes=nbytes))
    return tuple(chunks)


def chunk_places(entries: Sequence[TensorEntry], chunks: Sequence[Chunk]) -> dict[str, tuple[int, int]]:
    """Number of its chunk, and offset in there in bytes, of every tensor by name."""
    return {
        entry.name: (number, offset)
        for number, chunk in enumerate(chunks)
        for entry, offset in zip(entries[chunk.first : chunk.last], chunk.offsets, strict=True)
    }


def check_alignment(entries: Sequence[TensorEntry], chunks: Sequence[Chunk]) -> None:
    """A receiver looks at a tensor where it lies in its chunk: at a multiple of its element's size.

    Raises:
        WeightUpdateError: a tensor lies askew, after one of a smaller dtype and an odd number of elements.
    """
    for chunk in chunks:
        for entry, offset in zip(entries[chunk.first : chunk.last], chunk.offsets, strict=True):
            if entry.nbytes and offset % ITEM_BYTES[entry.dtype]:
                raise WeightUpdateError(
                    f"tensor {entry.name!r} of dtype {entry.dtype} would lie at byte {offset} of its chunk, which is "
                    "no multiple of its element's size: weights of mixed dtypes need weights.transport=shm or disk"
                )
