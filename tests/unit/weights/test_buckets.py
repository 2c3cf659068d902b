from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_like.weights.buckets import ALIGNMENT, Cursor, Piece, aligned_bucket_bytes, plan_buckets


def _piece(bucket: int, offset: int, tensor_offset: int, nbytes: int) -> Piece:
    return Piece(bucket=bucket, offset=offset, tensor_offset=tensor_offset, nbytes=nbytes)


def test_small_tensors_share_a_bucket_at_aligned_offsets() -> None:
    assert plan_buckets([10, 64, 1], 256) == (
        (_piece(0, 0, 0, 10),),
        (_piece(0, 64, 0, 64),),
        (_piece(0, 128, 0, 1),),
    )


def test_large_tensors_are_split_and_fill_what_is_left() -> None:
    assert plan_buckets([64, 200, 4], 128) == (
        (_piece(0, 0, 0, 64),),
        (_piece(0, 64, 0, 64), _piece(1, 0, 64, 128), _piece(2, 0, 192, 8)),
        (_piece(2, 64, 0, 4),),
    )


def test_an_empty_tensor_takes_no_room() -> None:
    assert plan_buckets([0, 8], 64) == ((), (_piece(0, 0, 0, 8),))


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 10))
def test_pieces_cover_every_tensor_once_and_never_overlap(sizes: list[int], lines: int) -> None:
    bucket_bytes = lines * ALIGNMENT
    taken: set[tuple[int, int]] = set()
    for size, pieces in zip(sizes, plan_buckets(sizes, bucket_bytes), strict=True):
        covered: list[int] = []
        for piece in pieces:
            assert piece.nbytes > 0
            covered += range(piece.tensor_offset, piece.tensor_offset + piece.nbytes)
            places = {(piece.bucket, piece.offset + i) for i in range(piece.nbytes)}
            assert all(offset < bucket_bytes for _, offset in places)
            assert not places & taken
            taken |= places
        assert covered == list(range(size))
        assert not pieces or pieces[0].offset % ALIGNMENT == 0


def test_bucket_sizes_must_be_aligned() -> None:
    assert aligned_bucket_bytes(4100) == 4096
    assert aligned_bucket_bytes(1) == ALIGNMENT
    for size in (0, -64, 100):
        with pytest.raises(ValueError, match="multiple of 64"):
            Cursor(bucket_bytes=size)
