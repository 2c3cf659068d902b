from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from areal_like.api.weights import TransportKind
from areal_like.errors import WeightUpdateError
from areal_like.weights.segment_layout import HEADER_BYTES
from areal_like.weights.segments import list_segments, remove_segments, segment_directory, segment_path
from areal_like.weights.transports.base import WeightWriter, make_reader

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def writer(new_writer: Callable[..., WeightWriter]) -> Iterator[WeightWriter]:
    made = new_writer(TransportKind.SHM)
    yield made
    made.close()


def test_two_private_segments_take_turns_and_go_with_the_writer(
    writer: WeightWriter, tensors: Tensors, run_id: str
) -> None:
    locations = [writer.write(v, 0, tensors.items()).location for v in range(4)]
    assert locations[0] == locations[2] != locations[1] == locations[3]
    assert list_segments(run_id) == tuple(sorted(set(locations)))
    for name in set(locations):
        assert stat.S_IMODE(segment_path(name).stat().st_mode) == 0o600
    writer.close()
    writer.close()
    assert list_segments(run_id) == ()
    assert not [name for name in os.listdir(segment_directory()) if run_id in name]


def test_the_version_before_stays_readable_the_one_before_that_is_refused(
    writer: WeightWriter, tensors: Tensors
) -> None:
    first, second = (writer.write(v, 0, tensors.items()) for v in (1, 2))
    with make_reader(first), make_reader(second):
        pass
    writer.write(3, 0, tensors.items())
    with pytest.raises(WeightUpdateError, match=r"no longer holds version 1 .* now version 3"):
        make_reader(first)


def test_a_slow_reader_finds_out_that_its_segment_was_overwritten(writer: WeightWriter, tensors: Tensors) -> None:
    first = writer.write(1, 0, tensors.items())
    entry = first.tensors[0]
    target = torch.empty(entry.shape)
    with make_reader(first) as reader:
        reader.read_into(entry, target)
        assert torch.equal(target, tensors["embed"])
        writer.write(2, 0, tensors.items())
        reader.read_into(entry, target)
        writer.write(3, 0, tensors.items())
        with pytest.raises(WeightUpdateError, match="no longer holds version 1"):
            reader.read_into(entry, target)


def test_the_same_version_of_another_incarnation_is_refused(writer: WeightWriter, tensors: Tensors) -> None:
    manifest = writer.write(1, 0, tensors.items())
    with pytest.raises(WeightUpdateError, match="incarnation 7"):
        make_reader(manifest.model_copy(update={"incarnation": 7}))


def test_a_write_that_breaks_off_leaves_the_segment_unreadable_and_the_other_intact(
    writer: WeightWriter, tensors: Tensors
) -> None:
    first, second = (writer.write(v, 0, tensors.items()) for v in (1, 2))

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "embed", tensors["embed"]
        raise RuntimeError("the exporter died")

    with pytest.raises(RuntimeError, match="the exporter died"):
        writer.write(3, 0, broken())
    with pytest.raises(WeightUpdateError, match="now version -1"):
        make_reader(first)
    with make_reader(second):
        pass
    assert writer.write(3, 0, tensors.items()).location == first.location


def test_ties_and_equal_tensors_lie_there_once(writer: WeightWriter) -> None:
    big = torch.randn(4096)
    manifest = writer.write(1, 0, {"a": big, "tied": big, "copy": big.clone()}.items())
    assert segment_path(manifest.location).stat().st_size == HEADER_BYTES + 4096 * 4


def test_a_segment_that_is_gone_or_foreign_is_named(writer: WeightWriter, tensors: Tensors, run_id: str) -> None:
    manifest = writer.write(1, 0, tensors.items())
    segment_path(manifest.location).write_bytes(b"\0" * 100)
    with pytest.raises(WeightUpdateError, match="holds no weights of ours"):
        make_reader(manifest)
    segment_path(manifest.location).write_bytes(b"")
    with pytest.raises(WeightUpdateError, match="has no header"):
        make_reader(manifest)
    remove_segments(run_id)
    with pytest.raises(WeightUpdateError, match="cannot be opened"):
        make_reader(manifest)
    with pytest.raises(WeightUpdateError, match="not a segment name"):
        make_reader(manifest.model_copy(update={"location": "/etc/passwd"}))


def test_a_truncated_segment_is_an_error_not_a_signal(writer: WeightWriter, tensors: Tensors) -> None:
    manifest = writer.write(1, 0, tensors.items())
    os.truncate(segment_path(manifest.location), HEADER_BYTES + 8)
    with make_reader(manifest) as reader, pytest.raises(WeightUpdateError, match=r"'embed'.*too early"):
        reader.read_into(manifest.tensors[0], torch.empty(50, 33))


def test_a_full_memory_is_a_named_error(
    writer: WeightWriter, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(WeightUpdateError, match=r"No space left.*weights\.transport=disk"):
        writer.write(1, 0, tensors.items())


def test_memory_does_not_grow_over_versions(writer: WeightWriter, tensors: Tensors) -> None:
    sizes = [Path(segment_path(writer.write(v, 0, tensors.items()).location)).stat().st_size for v in range(6)]
    assert len(set(sizes)) == 1
