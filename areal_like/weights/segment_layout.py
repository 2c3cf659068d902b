"""What lies where in a shared-memory segment of weights: a header page, then buckets. Torch-free."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from areal_like.api.weights import TensorEntry
from areal_like.weights.buckets import Piece, plan_buckets

#: the buckets start here: one page
HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sqqQ32s")
#: bytes that a header takes of its page
HEADER_SIZE = _HEADER.size
_MAGIC = b"ALWGTS01"
#: the version written into a header while the bytes behind it change
UNFINISHED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """What a segment holds. ``version`` is -1 while it is being overwritten."""

    incarnation: int
    version: int
    bucket_bytes: int
    digest: str

    def pack(self) -> bytes:
        return _HEADER.pack(_MAGIC, self.incarnation, self.version, self.bucket_bytes, self.digest.encode())

    @classmethod
    def unpack(cls, data: bytes) -> SegmentHeader | None:
        """None when ``data`` is no header."""
        magic, incarnation, version, bucket_bytes, digest = _HEADER.unpack(data)
        if magic != _MAGIC:
            return None
        return cls(
            incarnation=incarnation, version=version, bucket_bytes=bucket_bytes, digest=digest.rstrip(b"\0").decode()
        )


def content_key(entry: TensorEntry) -> tuple[str, str]:
    """Equal for tensors that may share bytes. The digest covers dtype and shape as well."""
    return entry.digest, entry.dtype


def file_position(piece: Piece, bucket_bytes: int) -> int:
    """Where a piece lies in the segment's file."""
    return HEADER_BYTES + piece.bucket * bucket_bytes + piece.offset


def plan_pieces(entries: Sequence[TensorEntry], bucket_bytes: int) -> dict[tuple[str, str], tuple[Piece, ...]]:
    """The writer's layout, derived again from the manifest."""
    distinct = {content_key(entry): entry.nbytes for entry in entries}
    return dict(zip(distinct, plan_buckets(distinct.values(), bucket_bytes), strict=True))
