from __future__ import annotations

import os
import stat

import pytest

from areal_like.weights.segments import (
    create_segment,
    list_segments,
    open_segment,
    read_at,
    remove_segments,
    segment_name,
    segment_path,
    write_at,
)


def test_a_segment_is_private_and_found_by_its_run(run_id: str) -> None:
    name = segment_name(run_id, "w")
    fd = create_segment(name)
    try:
        assert stat.S_IMODE(segment_path(name).stat().st_mode) == 0o600
        assert list_segments(run_id) == (name,)
    finally:
        os.close(fd)
    assert remove_segments(run_id) == (name,)
    assert list_segments(run_id) == ()


def test_a_run_does_not_list_another_whose_name_starts_alike(run_id: str) -> None:
    longer = f"{run_id}-2"
    os.close(create_segment(segment_name(longer, "w")))
    try:
        assert list_segments(run_id) == ()
    finally:
        assert len(remove_segments(longer)) == 1


def test_a_leftover_is_replaced_and_its_reader_keeps_the_old_bytes(run_id: str) -> None:
    name = segment_name(run_id, "w")
    old = create_segment(name)
    write_at(old, memoryview(b"old"), 0)
    reader = open_segment(name)
    new = create_segment(name)
    write_at(new, memoryview(b"new"), 0)
    buffer = bytearray(3)
    read_at(reader, memoryview(buffer), 0)
    assert buffer == b"old"
    for fd in (old, new, reader):
        os.close(fd)


def test_a_link_is_not_followed(run_id: str, tmp_path: os.PathLike[str]) -> None:
    name = segment_name(run_id, "w")
    segment_path(name).symlink_to(tmp_path)
    with pytest.raises(OSError, match="symbolic"):
        open_segment(name)


@pytest.mark.parametrize("name", ["../etc/passwd", "areal-like-a/b", "other", "/dev/shm/areal-like-x+w", ""])
def test_names_from_a_socket_cannot_lead_elsewhere(name: str) -> None:
    with pytest.raises(ValueError, match="not a segment name"):
        open_segment(name)


@pytest.mark.parametrize("run_id", ["", "a/b", "a b", "a+b", "é", "x" * 129])
def test_run_ids_must_be_file_names(run_id: str) -> None:
    with pytest.raises(ValueError, match="run id"):
        segment_name(run_id, "w")


def test_reading_past_the_end_is_an_error(run_id: str) -> None:
    fd = create_segment(segment_name(run_id, "w"))
    write_at(fd, memoryview(b"1234"), 0)
    with pytest.raises(EOFError, match="3 bytes too early"):
        read_at(fd, memoryview(bytearray(5)), 2)
    os.close(fd)
