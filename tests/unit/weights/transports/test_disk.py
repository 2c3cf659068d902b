from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_like.api.weights import TransportKind
from areal_like.errors import WeightUpdateError
from areal_like.weights.snapshot_folders import list_snapshots, remove_snapshots
from areal_like.weights.transports.base import WeightWriter, make_reader

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def writer(new_writer: Callable[..., WeightWriter]) -> WeightWriter:
    return new_writer(TransportKind.DISK)


def test_a_snapshot_is_plain_safetensors_of_bounded_size(writer: WeightWriter) -> None:
    tensors = {str(i): torch.randn(256) for i in range(6)} | {"large": torch.randn(3000)}
    directory = Path(writer.write(1, 0, tensors.items()).location)
    shards = [load_file(path) for path in sorted(directory.glob("*.safetensors"))]
    assert [sorted(shard) for shard in shards] == [["0", "1", "2", "3"], ["4", "5"], ["large"]]
    assert all(torch.equal(shard[name], tensors[name]) for shard in shards for name in shard)


def test_ties_are_stored_once(writer: WeightWriter, tensors: Tensors) -> None:
    directory = Path(writer.write(1, 0, tensors.items()).location)
    index = json.loads((directory / "index.json").read_text())
    assert index["head"] == index["embed"]


def test_the_last_two_versions_stay_and_nothing_else_is_touched(writer: WeightWriter, tensors: Tensors) -> None:
    manifests = [writer.write(v, 0, tensors.items()) for v in (1, 2)]
    directory = Path(manifests[0].location).parent
    (directory / "notes").mkdir()
    (directory / ".writing-v00000009-i0").mkdir()
    manifests.append(writer.write(3, 0, tensors.items()))
    assert sorted(p.name for p in directory.iterdir()) == ["notes", "v00000002-i0", "v00000003-i0"]
    with pytest.raises(WeightUpdateError, match="only the last 2 versions"):
        make_reader(manifests[0])
    with make_reader(manifests[1]), make_reader(manifests[2]):
        pass


def test_all_versions_go_at_once_and_nothing_else_does(writer: WeightWriter, tensors: Tensors) -> None:
    manifests = [writer.write(v, 0, tensors.items()) for v in (1, 2)]
    directory = Path(manifests[0].location).parent
    (directory / ".writing-v00000009-i0").mkdir()
    (directory / "notes").mkdir()
    with make_reader(manifests[1]) as reader:
        target = torch.empty(tensors["scale"].shape)
        entry = next(t for t in manifests[1].tensors if t.name == "scale")
        reader.read_into(entry, target)
        remove_snapshots(directory)
    assert torch.equal(target, tensors["scale"])
    assert [p.name for p in directory.iterdir()] == ["notes"]
    (directory / "notes").rmdir()
    remove_snapshots(directory)
    assert not directory.exists()
    remove_snapshots(directory)
    assert list_snapshots(directory) == set()


def test_nothing_is_removed_where_a_link_leads(tmp_path: Path) -> None:
    """Neither from a directory that is one, nor what a version's name or a part of a version leads to."""
    theirs, ours = tmp_path / "another" / "v00000001-i0", tmp_path / "run" / "weights"
    theirs.mkdir(parents=True)
    (theirs / "index.json").write_text("{}")
    ours.mkdir(parents=True)
    (tmp_path / "run" / "linked").symlink_to(theirs.parent)
    (ours / "v00000001-i0").symlink_to(theirs)
    (ours / "v00000002-i0").mkdir()
    (ours / "v00000002-i0" / "view").symlink_to(theirs)
    for directory in (tmp_path / "run" / "linked", ours):
        remove_snapshots(directory)
        assert (theirs / "index.json").read_text() == "{}"
    assert not (ours / "v00000002-i0").exists()


def test_the_same_version_may_be_written_again(writer: WeightWriter, tensors: Tensors) -> None:
    first = writer.write(1, 0, tensors.items())
    changed = tensors | {"scale": torch.tensor(2.0)}
    second = writer.write(1, 0, changed.items())
    assert first.location == second.location
    entry = next(t for t in second.tensors if t.name == "scale")
    target = torch.tensor(0.0)
    with make_reader(second) as reader:
        reader.read_into(entry, target)
    assert target.item() == 2.0


def test_a_write_that_breaks_off_leaves_no_trace(writer: WeightWriter, tensors: Tensors) -> None:
    good = writer.write(1, 0, tensors.items())

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "embed", tensors["embed"]
        raise RuntimeError("the exporter died")

    with pytest.raises(RuntimeError, match="the exporter died"):
        writer.write(2, 0, broken())
    assert [p.name for p in Path(good.location).parent.iterdir()] == ["v00000001-i0"]


def test_an_exporter_may_reuse_its_buffer(writer: WeightWriter) -> None:
    buffer = torch.zeros(3)

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for value in (1.0, 2.0):
            yield str(value), buffer.fill_(value)

    manifest = writer.write(1, 0, export())
    target = torch.empty(3)
    with make_reader(manifest) as reader:
        reader.read_into(manifest.tensors[0], target)
    assert target.tolist() == [1.0, 1.0, 1.0]


def test_a_file_of_another_shape_is_named(writer: WeightWriter, tensors: Tensors) -> None:
    manifest = writer.write(1, 0, {"a": torch.zeros(4)}.items())
    save_file({"a": torch.zeros(5)}, Path(manifest.location) / "weights-00000.safetensors")
    with make_reader(manifest) as reader, pytest.raises(WeightUpdateError, match=r"'a'.*\(5,\)"):
        reader.read_into(manifest.tensors[0], torch.empty(4))


def test_a_damaged_file_or_index_is_named(writer: WeightWriter) -> None:
    manifest = writer.write(1, 0, {"a": torch.zeros(4)}.items())
    directory = Path(manifest.location)
    (directory / "weights-00000.safetensors").write_bytes(b"short")
    with make_reader(manifest) as reader, pytest.raises(WeightUpdateError, match="'a'"):
        reader.read_into(manifest.tensors[0], torch.empty(4))
    (directory / "index.json").write_text('{"a": ["../elsewhere", "a"]}')
    with make_reader(manifest) as reader, pytest.raises(WeightUpdateError, match="a file elsewhere"):
        reader.read_into(manifest.tensors[0], torch.empty(4))
    (directory / "index.json").write_text("{}")
    with make_reader(manifest) as reader, pytest.raises(WeightUpdateError, match="not in the index"):
        reader.read_into(manifest.tensors[0], torch.empty(4))


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, new_writer: Callable[..., WeightWriter]) -> None:
    (tmp_path / "weights").write_text("a file where the directory should be")
    with pytest.raises(WeightUpdateError, match="writing version 1 failed"):
        new_writer(TransportKind.DISK).write(1, 0, {"a": torch.zeros(4)}.items())
