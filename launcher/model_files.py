"""A Hugging Face model folder, looked at without loading it."""

from __future__ import annotations

import json
import struct
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
_LFS_MARK = b"version https://git-lfs"


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
        raise ConfigError(
            f"model.path: {folder} {what}; expected a folder with a Hugging Face model (looked from {Path.cwd()})"
        )
    config = _read_json(folder / "config.json")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(f"model.path: {folder} has no tokenizer; expected one of {', '.join(_TOKENIZER_FILES)}")
    files = _weight_files(folder)
    for file in files:
        _check_whole(file)
    text_config = config.get("text_config", config)
    known = [text_config[key] for key in _CONTEXT_KEYS if isinstance(text_config.get(key), int)]
    return ModelFacts(
        folder=folder,
        context_length=known[0] if known else None,
        weight_bytes=sum(file.stat().st_size for file in files),
    )


def vocabulary_size(folder: Path) -> int | None:
    """Tokens that the model knows, if its config tells. Raises: ConfigError: there is no config."""
    config = _read_json(folder / "config.json")
    size = config.get("text_config", config).get("vocab_size")
    return size if isinstance(size, int) else None


def _weight_files(folder: Path) -> list[Path]:
    for name in _SINGLE_WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
    for name in _WEIGHT_INDEXES:
        if (folder / name).is_file():
            shards = sorted(set(_read_json(folder / name).get("weight_map", {}).values()))
            missing = [shard for shard in shards if not (folder / shard).is_file()]
            if missing or not shards:
                raise ConfigError(f"model.path: {folder}: {name} names {missing or 'no files'}, not in the folder")
            return [folder / shard for shard in shards]
    raise ConfigError(f"model.path: {folder} has no weights; expected {' or '.join(_SINGLE_WEIGHTS)}, or an index")


def _check_whole(file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(len(_LFS_MARK))
        if start == _LFS_MARK:
            raise ConfigError(f"model.path: {file} is a git-lfs pointer, not weights; run `git lfs pull`")
        if file.suffix != ".safetensors":
            return
        stream.seek(0)
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _LONGEST_HEADER + 1
        if length > min(_LONGEST_HEADER, size):
            raise ConfigError(f"model.path: {file} ({size} bytes) is no safetensors file; copy or download it again")
        try:
            header = json.loads(stream.read(length))
            end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"model.path: {file} has a broken header; copy or download it again") from None
    if size != 8 + length + end:
        raise ConfigError(f"model.path: {file} has {size} bytes of {8 + length + end}; copy or download it again")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"model.path: {file.parent} has no {file.name}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {file} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"model.path: {file} holds no JSON object")
    return found
