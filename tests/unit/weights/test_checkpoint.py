"""Safetensors files read and written without torch, compared with the library's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_like.api.weights import Manifest, TensorEntry, TransportKind
from areal_like.errors import WeightUpdateError
from areal_like.weights.checkpoint import Expected, read_headers, write_file
from areal_like.weights.digest import tensor_entry
from areal_like.weights.manifest import make_manifest

TENSORS = {
    "a": torch.arange(6, dtype=torch.uint8).reshape(2, 3),
    "b": torch.linspace(-1, 1, 7).bfloat16(),
    "c": torch.linspace(0, 5, 8, dtype=torch.float64).reshape(2, 2, 2),
    "d": torch.tensor(2.5),
}


def raw(entry: TensorEntry) -> Iterator[memoryview]:
    data = memoryview(bytes(TENSORS[entry.name].reshape(-1).view(torch.uint8).tolist()))
    yield data[: len(data) // 2]
    yield data[len(data) // 2 :]


def test_what_is_written_the_library_reads(tmp_path: Path) -> None:
    write_file(tmp_path / "x.safetensors", [tensor_entry(*pair) for pair in TENSORS.items()], raw)
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert (tmp_path / "x.safetensors").stat().st_mode & 0o077 == 0


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"], "b": TENSORS["b"]}, tmp_path / "1.safetensors", {"format": "pt"})
    save_file({"c": TENSORS["c"]}, tmp_path / "2.safetensors")
    found = read_headers(tmp_path)
    assert {name: (stored.dtype, stored.shape) for name, stored in found.items()} == {
        "a": ("uint8", (2, 3)),
        "b": ("bfloat16", (7,)),
        "c": ("float64", (2, 2, 2)),
    }
    for name, stored in found.items():
        assert b"".join(stored.chunks()) == bytes(TENSORS[name].reshape(-1).view(torch.uint8).tolist())


def test_bytes_that_are_not_those_of_the_manifest_are_not_passed_on(tmp_path: Path) -> None:
    wrong = tensor_entry("b", TENSORS["b"] + 1)
    with pytest.raises(WeightUpdateError, match="tensor 'b': its 14 bytes have digest"):
        write_file(tmp_path / "x.safetensors", [wrong], raw)


def test_a_folder_without_weights_and_a_broken_file(tmp_path: Path) -> None:
    with pytest.raises(WeightUpdateError, match="holds no safetensors files"):
        read_headers(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(WeightUpdateError, match="is no safetensors file"):
        read_headers(tmp_path)


def test_a_file_that_ends_too_early(tmp_path: Path) -> None:
    save_file({"c": TENSORS["c"]}, tmp_path / "x.safetensors")
    stored = read_headers(tmp_path)["c"]
    data = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(data[:-3])
    with pytest.raises(EOFError, match="3 bytes too early"):
        list(stored.chunks())


def manifest(**tensors: torch.Tensor) -> Manifest:
    entries = [tensor_entry(name.replace("__", "."), tensor) for name, tensor in tensors.items()]
    return make_manifest(3, 0, TransportKind.DISK, "/nowhere", entries)


def test_a_head_of_its_own_may_be_another_than_the_embedding(tmp_path: Path) -> None:
    whole = {"model__embed_tokens__weight": torch.zeros(4, 2), "lm_head__weight": torch.ones(4, 2)}
    save_file({name.replace("__", "."): tensor for name, tensor in whole.items()}, tmp_path / "m.safetensors")
    Expected.of(tmp_path, tied=False).check(manifest(**whole))
    with pytest.raises(WeightUpdateError, match="tied here"):
        Expected.of(tmp_path, tied=True).check(manifest(**whole))


def test_an_update_must_be_whole(tmp_path: Path) -> None:
    embedding, norm = torch.zeros(4, 2), torch.zeros(2)
    save_file({"model.embed_tokens.weight": embedding, "model.norm.weight": norm}, tmp_path / "m.safetensors")
    tied, untied = Expected.of(tmp_path, tied=True), Expected.of(tmp_path, tied=False)
    whole = {"model__embed_tokens__weight": embedding, "model__norm__weight": norm}
    tied.check(manifest(**whole))
    tied.check(manifest(**whole, lm_head__weight=embedding))
    for head in (
        embedding + 1,
        embedding.bfloat16(),
    ):  # nobody would load it, and the receipt would say that it is there
        with pytest.raises(
            WeightUpdateError, match=r"'lm_head\.weight' are tied here, but the manifest has two contents"
        ):
            tied.check(manifest(lm_head__weight=head, **whole))
    with pytest.raises(WeightUpdateError, match=r"no tensor 'lm_head\.weight'"):
        untied.check(manifest(**whole, lm_head__weight=embedding))
    with pytest.raises(WeightUpdateError, match=r"version 3: tensor 'model\.norm\.weight' is missing"):
        tied.check(manifest(model__embed_tokens__weight=embedding))
    with pytest.raises(WeightUpdateError, match=r"has shape \(1, 2\), the model's is \(2,\)"):
        tied.check(manifest(**{**whole, "model__norm__weight": norm[None]}))
    with pytest.raises(WeightUpdateError, match="has dtype int64, which is no weight"):
        tied.check(manifest(**{**whole, "model__norm__weight": norm.long()}))
