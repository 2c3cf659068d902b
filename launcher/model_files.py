"""A Hugging Face model folder, looked at without loading it."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like.errors import ConfigError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_SINGLE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_WEIGHT_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
#: what architectures call the longest sequence they were built for
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
#: no safetensors header is longer (the format's own limit)
_LONGEST_HEADER = 100_000_000
#: folders that recipes name, and what makes them
_MADE_BY: Mapping[str, str] = {
    "models/smollm2": "make smollm2",
    "models/guess/model": "python -m launcher.tiny_models guess models/guess",
    "models/arithmetic/model": "python -m launcher.tiny_models arithmetic models/arithmetic",
}
_LFS_MARK = b"version https://git-lfs"
#: how torch.save began a file before it wrote zip files: a pickle of torch's magic number
_OLD_TORCH_MARK = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
#: what architectures call the matrix of a vector per token, at the end of its name
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """``context_length`` is None where config.json does not tell."""

    folder: Path
    context_length: int | None
    weight_bytes: int


def inspect_model(folder: Path) -> ModelFacts:
    """Check that ``folder`` holds a config, a tokenizer and whole weight files.

    Raises:
        ConfigError: names the file that is missing or broken.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        made_by = _MADE_BY.get(folder.as_posix())
        hint = f"; `{made_by}` makes it" if made_by else ""
        raise ConfigError(
            f"model.path: {folder} {what}; expected a folder with a Hugging Face model (looked from {Path.cwd()}){hint}"
        )
    config = _read_json(folder / "config.json")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(f"model.path: {folder} has no tokenizer; expected one of {', '.join(_TOKENIZER_FILES)}")
    files = _weight_files(folder)
    tensors = {name: entry for file in files for name, entry in _check_whole(file).items()}
    text_config = _text_config(config)
    _check_vocabulary(folder, text_config.get("vocab_size"), tensors)
    known = [text_config[key] for key in _CONTEXT_KEYS if isinstance(text_config.get(key), int)]
    return ModelFacts(
        folder=folder,
        context_length=known[0] if known else None,
        weight_bytes=sum(file.stat().st_size for file in files),
    )


def vocabulary_size(folder: Path) -> int | None:
    """Tokens that the model knows, if its config tells. Raises: ConfigError: there is no config."""
    config = _read_json(folder / "config.json")
    size = _text_config(config).get("vocab_size")
    return size if isinstance(size, int) else None


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config; only models of several kinds of input keep it apart."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _check_vocabulary(folder: Path, said: Any, tensors: Mapping[str, Any]) -> None:
    shapes = {name: entry["shape"] for name, entry in tensors.items() if name.endswith(_EMBEDDINGS)}
    found = {name: shape[0] for name, shape in shapes.items() if shape}
    if isinstance(said, int) and found and said not in found.values():
        name, rows = next(iter(found.items()))
        raise ConfigError(
            f"model.path: {folder}: config.json's vocab_size is {said}, and {name} has {rows} rows; they are not of "
            "one model, copy or download it again"
        )


def _weight_files(folder: Path) -> list[Path]:
    for name in _SINGLE_WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
    for name in _WEIGHT_INDEXES:
        if (folder / name).is_file():
            named = _read_json(folder / name).get("weight_map")
            if not isinstance(named, dict) or not all(isinstance(shard, str) for shard in named.values()):
                raise ConfigError(f"model.path: {folder}: {name} has no weight_map of tensors to files")
            shards = sorted(set(named.values()))
            missing = [shard for shard in shards if not (folder / shard).is_file()]
            if missing or not shards:
                raise ConfigError(f"model.path: {folder}: {name} names {missing or 'no files'}, not in the folder")
            return [folder / shard for shard in shards]
    raise ConfigError(f"model.path: {folder} has no weights; expected {' or '.join(_SINGLE_WEIGHTS)}, or an index")


def _check_whole(file: Path) -> dict[str, Any]:
    """The tensors of a weight file by name, as its header describes them; none are known of torch's own format."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(len(_LFS_MARK))
        if start == _LFS_MARK:
            raise ConfigError(f"model.path: {file} is a git-lfs pointer, not weights; run `git lfs pull`")
        if file.suffix != ".safetensors":
            if not start.startswith(_OLD_TORCH_MARK) and not zipfile.is_zipfile(stream):
                raise ConfigError(f"model.path: {file} ({size} bytes) is no whole torch file; copy it again")
            return {}
        stream.seek(0)
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _LONGEST_HEADER + 1
        if length > min(_LONGEST_HEADER, size):
            raise ConfigError(f"model.path: {file} ({size} bytes) is no safetensors file; copy or download it again")
        tensors = _read_header(stream.read(length))
    if tensors is None:
        raise ConfigError(f"model.path: {file} has a broken header; copy or download it again")
    end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    if size != 8 + length + end:
        raise ConfigError(f"model.path: {file} has {size} bytes of {8 + length + end}; copy or download it again")
    return tensors


def _read_header(text: bytes) -> dict[str, Any] | None:
    """The tensors that a safetensors header describes; None if it does not describe every one."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(header, dict):
        return None
    header.pop("__metadata__", None)
    return header if all(map(_describes_a_tensor, header.values())) else None


def _describes_a_tensor(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        return False
    return all(isinstance(number, int) and number >= 0 for number in [*shape, *offsets])


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"model.path: {file.parent} has no {file.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model.path: {file} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"model.path: {file} holds no JSON object")
    return found
