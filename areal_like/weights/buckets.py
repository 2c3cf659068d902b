"""Where each tensor lies in a row of fixed-size buckets. Pure arithmetic on sizes; no bytes, no torch.

Small tensors share a bucket; one that does not fit into what is left of a bucket is split over as many as it needs.
Every tensor starts at a multiple of ALIGNMENT, so that a view of any dtype is legal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: bytes: a cache line, and a multiple of every element size
ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Bytes [tensor_offset, tensor_offset + nbytes) of a tensor lie at ``offset`` of bucket ``bucket``."""

    bucket: int
    offset: int
    tensor_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """First free byte: ``offset`` of bucket ``bucket``. ``bucket_bytes`` is a positive multiple of ALIGNMENT."""

    bucket_bytes: int
    bucket: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        if self.bucket_bytes <= 0 or self.bucket_bytes % ALIGNMENT:
            raise ValueError(f"bucket_bytes must be a positive multiple of {ALIGNMENT}, got {self.bucket_bytes}")

    def place(self, nbytes: int) -> tuple[tuple[Piece, ...], Cursor]:
        """Pieces of the next tensor, and the cursor after it. An empty tensor has no pieces."""
        bucket, offset = self.bucket, self.offset
        pieces: list[Piece] = []
        done = 0
        while done < nbytes:
            if offset == self.bucket_bytes:
                bucket, offset = bucket + 1, 0
            take = min(nbytes - done, self.bucket_bytes - offset)
            pieces.append(Piece(bucket=bucket, offset=offset, tensor_offset=done, nbytes=take))
            done += take
            offset += take
        aligned = -(-offset // ALIGNMENT) * ALIGNMENT
        return tuple(pieces), Cursor(bucket_bytes=self.bucket_bytes, bucket=bucket, offset=aligned)


def plan_buckets(sizes: Iterable[int], bucket_bytes: int) -> tuple[tuple[Piece, ...], ...]:
    """Pieces of each tensor, in order; the same sizes always give the same plan on both sides of a seam."""
    cursor = Cursor(bucket_bytes=bucket_bytes)
    plan: list[tuple[Piece, ...]] = []
    for size in sizes:
        pieces, cursor = cursor.place(size)
        plan.append(pieces)
    return tuple(plan)


def aligned_bucket_bytes(requested: int) -> int:
    """The largest legal bucket size not above ``requested``."""
    return max(requested // ALIGNMENT, 1) * ALIGNMENT
