"""A published version as a folder that any engine can load."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal_like.api.weights import Manifest, TransportKind
from areal_like.errors import WeightUpdateError
from areal_like.weights.segments import list_segments, remove_segments, segment_path
from areal_like.weights.transports.base import WeightWriter, make_writer
from areal_like.weights.views import open_view

WEIGHTS = {
    "model.embed.weight": torch.linspace(-1, 1, 5000).reshape(50, 100),
    "model.norm.weight": torch.ones(8).bfloat16(),
    "model.other_norm.weight": torch.ones(8).bfloat16(),  # lies in a snapshot once
}


@pytest.fixture
def run_id() -> Iterator[str]:
    name = f"views-{uuid.uuid4().hex[:10]}"
    yield name
    left = list_segments(name)
    remove_segments(name)
    assert left == ()


@pytest.fixture(params=[TransportKind.DISK, TransportKind.SHM])
def writer(request: pytest.FixtureRequest, run_id: str, tmp_path: Path) -> Iterator[WeightWriter]:
    made = make_writer(request.param, run_id=run_id, directory=tmp_path, bucket_bytes=4096)
    yield made
    made.close()


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_folder_holds_every_tensor_under_its_own_name(writer: WeightWriter) -> None:
    manifest = writer.write(4, 0, iter(WEIGHTS.items()))
    view = open_view(manifest, "server 0/x")
    try:
        assert same(loaded(view.folder), WEIGHTS)
        for entry in manifest.tensors:
            expected = bytes(WEIGHTS[entry.name].reshape(-1).view(torch.uint8).tolist())
            assert b"".join(view.content(entry)) == expected
    finally:
        view.remove()
    assert not view.folder.exists()


def test_a_snapshot_without_aliases_is_its_own_view(tmp_path: Path, run_id: str) -> None:
    writer = make_writer(TransportKind.DISK, run_id=run_id, directory=tmp_path)
    plain = {name: tensor for name, tensor in WEIGHTS.items() if "other" not in name}
    manifest = writer.write(1, 0, iter(plain.items()))
    view = open_view(manifest, "s0")
    view.remove()
    assert view.folder == Path(manifest.location)
    assert same(loaded(view.folder), plain)


def test_each_server_has_a_view_of_its_own(writer: WeightWriter) -> None:
    manifest = writer.write(4, 0, iter(WEIGHTS.items()))
    first, second = open_view(manifest, "s0"), open_view(manifest, "s1")
    first.remove()
    assert same(loaded(second.folder), WEIGHTS)
    second.remove()


def test_a_version_that_is_gone_or_overwritten_is_refused(writer: WeightWriter) -> None:
    manifest = writer.write(1, 0, iter(WEIGHTS.items()))
    for version in (2, 3):
        changed = {name: tensor + version for name, tensor in WEIGHTS.items()}
        writer.write(version, 0, iter(changed.items()))
    with pytest.raises(WeightUpdateError, match="version 1"):
        open_view(manifest, "s0")


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def test_damaged_bytes_are_named(writer: WeightWriter) -> None:
    manifest = writer.write(1, 0, iter({"model.embed.weight": WEIGHTS["model.embed.weight"]}.items()))
    if manifest.transport is TransportKind.SHM:
        path = segment_path(manifest.location)
        data = bytearray(path.read_bytes())
        data[4096 + 10] ^= 1
        path.write_bytes(data)
    else:
        spoil(next(Path(manifest.location).glob("*.safetensors")))
    with pytest.raises(WeightUpdateError, match=r"tensor 'model\.embed\.weight': its 20000 bytes have digest"):
        open_view(manifest, "s0")


def test_a_transport_without_folders(writer: WeightWriter) -> None:
    manifest = writer.write(1, 0, iter(WEIGHTS.items()))
    with pytest.raises(WeightUpdateError, match="has no folder"):
        open_view(Manifest(**{**manifest.model_dump(), "transport": TransportKind.COLLECTIVE}), "s0")
