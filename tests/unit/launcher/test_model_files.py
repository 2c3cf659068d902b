from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_like.config.load import load_config
from areal_like.errors import ConfigError
from launcher.model_files import inspect_model, vocabulary_size
from tests.unit.launcher.conftest import write_safetensors

CONFIGS = Path(__file__).parents[3] / "configs"


def test_a_whole_folder_is_described(model_folder: Path) -> None:
    facts = inspect_model(model_folder)
    assert facts.context_length == 64
    assert facts.weight_bytes == (model_folder / "model.safetensors").stat().st_size


def test_the_context_of_a_nested_config_is_found_and_a_silent_one_is_unknown(model_folder: Path) -> None:
    config = model_folder / "config.json"
    config.write_text(json.dumps({"text_config": {"n_positions": 12}}))
    assert inspect_model(model_folder).context_length == 12
    config.write_text("{}")
    assert inspect_model(model_folder).context_length is None


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])


def pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def header(content: Any) -> Callable[[Path], None]:
    return lambda folder: write_safetensors(folder / "model.safetensors", content, bytes(8))


def torch_file(content: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(content)

    return write


def index(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(text)

    return write


def index_of_a_missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model-1.safetensors"}}')


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "holds no JSON object"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer; expected one of tokenizer.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights; expected model.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), "is no safetensors file"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "is no safetensors file"),
        (cut, "bytes of"),
        (header([]), "has a broken header"),
        (header({"w": []}), "has a broken header"),
        (header({"w": {"shape": [2], "data_offsets": [0, "8"]}}), "has a broken header"),
        (header({"w": {"shape": 2, "data_offsets": [0, 8]}}), "has a broken header"),
        (torch_file(b"garbage" * 100), "is no whole torch file; copy it again"),
        (torch_file(b"PK\x03\x04 cut short"), "is no whole torch file"),
        (index('{"weight_map": ["a"]}'), "index.json has no weight_map of tensors to files"),
        (index('{"weight_map": {"w": 3}}'), "index.json has no weight_map of tensors to files"),
        (index("{}"), "index.json has no weight_map of tensors to files"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "cannot be read as JSON"),
        (pointer, "is a git-lfs pointer, not weights; run `git lfs pull`"),
        (index_of_a_missing_shard, "model.safetensors.index.json names ['model-1.safetensors'], not in the folder"),
    ],
)
def test_what_is_missing_or_broken_is_named(model_folder: Path, break_it: Callable[[Path], object], said: str) -> None:
    break_it(model_folder)
    with pytest.raises(ConfigError) as caught:
        inspect_model(model_folder)
    assert said in str(caught.value)
    assert str(caught.value).startswith("model.path: ")


def test_shards_are_added_up(model_folder: Path) -> None:
    whole = (model_folder / "model.safetensors").read_bytes()
    (model_folder / "model.safetensors").unlink()
    names = [f"model-{i}.safetensors" for i in range(2)]
    for name in names:
        (model_folder / name).write_bytes(whole)
    weight_map = dict(zip("ab", names, strict=True))
    (model_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert inspect_model(model_folder).weight_bytes == 2 * len(whole)


@pytest.mark.parametrize("recipe", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_missing_model_that_we_can_make_is_told_with_what_makes_it(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = load_config(str(recipe), []).model.path
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"{path} does not exist") as caught:
        inspect_model(Path(path))
    assert ("` makes it" in str(caught.value)) == (path != "models/policy")  # that is the user's own


def test_a_file_is_no_folder(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="is a file; expected a folder"):
        inspect_model(model_folder / "config.json")


@pytest.mark.parametrize("nested", [None, [], "x"])
def test_a_text_config_that_is_none_is_passed_over(model_folder: Path, nested: Any) -> None:
    content = {"text_config": nested, "max_position_embeddings": 12, "vocab_size": 3}
    (model_folder / "config.json").write_text(json.dumps(content))
    assert inspect_model(model_folder).context_length == 12
    assert vocabulary_size(model_folder) == 3


@pytest.mark.parametrize("old", [False, True])
def test_both_formats_of_torch_are_known(model_folder: Path, old: bool) -> None:
    (model_folder / "model.safetensors").unlink()
    file = model_folder / "pytorch_model.bin"
    torch.save({"w": torch.zeros(2)}, file, _use_new_zipfile_serialization=not old)
    assert inspect_model(model_folder).weight_bytes == file.stat().st_size


def test_an_embedding_of_another_size_than_the_config_says_is_refused(model_folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}
    write_safetensors(model_folder / "model.safetensors", {"model.embed_tokens.weight": entry}, bytes(8))
    (model_folder / "config.json").write_text('{"vocab_size": 2}')
    assert inspect_model(model_folder).weight_bytes > 8
    (model_folder / "config.json").write_text('{"vocab_size": 3}')
    with pytest.raises(ConfigError, match=r"vocab_size is 3, and model\.embed_tokens\.weight has 2 rows"):
        inspect_model(model_folder)
