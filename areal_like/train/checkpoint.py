"""A Hugging Face checkpoint, complete or absent, never half."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from areal_like.errors import ArealLikeError

#: bytes of one file of weights
SHARD_BYTES = 4 * 2**30
#: files of the source folder that hold weights or are written anew; all others (tokenizer, templates) are copied
_REWRITTEN = ("config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


def write_checkpoint(
    directory: Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    config: Any,
    source: Path,
    shard_bytes: int = SHARD_BYTES,
    also: Callable[[Path], object] | None = None,
) -> Path:
    """Write weights, ``config`` (a transformers config) and the other files of ``source`` into ``directory``.

    Everything is written into a folder beside it, flushed, and renamed; what ``directory`` held before is gone then.
    Holds at most ``shard_bytes`` of tensors at a time.

    Args:
        also: writes more into the folder it is given, before that takes its place.

    Raises:
        ArealLikeError: a disk is full or gone; ``directory`` holds what it held before.
    """
    directory = directory.absolute()
    aside = directory.with_name(f".{directory.name}.{uuid4().hex[:8]}")
    try:
        aside.mkdir(parents=True)
        dtype = _write_weights(aside, tensors, shard_bytes)
        _write_config(aside, config, dtype)
        for path in sorted(source.iterdir()):
            if path.is_file() and path.name not in _REWRITTEN and path.suffix not in _WEIGHT_SUFFIXES:
                shutil.copyfile(path, aside / path.name)
        if also is not None:
            also(aside)
        for path in aside.iterdir():
            _flush(path)
        _flush(aside)
        _replace(aside, directory)
    except (OSError, SafetensorError) as error:
        raise ArealLikeError(
            f"{directory}: no checkpoint could be written: {error}; it needs a folder that can be written and room for "
            "the whole model: free space on its disk, or write to another"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return directory


def _write_weights(directory: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> torch.dtype:
    """Returns the dtype of the first tensor."""
    dtype, total = torch.float32, 0
    files: list[list[str]] = []
    for number, shard in enumerate(_shards(tensors, shard_bytes)):
        if number == 0:
            dtype = next(iter(shard.values())).dtype
        total += sum(t.nbytes for t in shard.values())
        files.append(list(shard))
        save_file(shard, directory / f"part-{number}", metadata={"format": "pt"})
    if len(files) == 1:
        (directory / "part-0").rename(directory / "model.safetensors")
        return dtype
    index: dict[str, str] = {}
    for number, names in enumerate(files):
        file_name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (directory / f"part-{number}").rename(directory / file_name)
        index |= dict.fromkeys(names, file_name)
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(content, indent=2))
    return dtype


def _shards(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Private copies on the CPU, as many as fit into one file."""
    shard: dict[str, Tensor] = {}
    used = 0
    for name, tensor in tensors:
        if shard and used + tensor.nbytes > shard_bytes:
            yield shard
            shard, used = {}, 0
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        used += tensor.nbytes
    if shard:
        yield shard


def _write_config(directory: Path, config: Any, dtype: torch.dtype) -> None:
    content = config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(content, indent=2, sort_keys=True, default=str))


def _replace(new: Path, directory: Path) -> None:
    """Put ``new`` in the place of ``directory``. A rename cannot replace a full folder, so the old one steps aside."""
    old = directory.with_name(f".{directory.name}.{uuid4().hex[:8]}.old")
    if directory.exists():
        directory.rename(old)
    new.rename(directory)
    _flush(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def _flush(path: Path) -> None:
    """Make a file or a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
