"""Folders of safetensors files, read and written by their layout alone. Torch-free.

A file is eight bytes (length of the header, little-endian), a JSON header (name -> dtype, shape, data_offsets) and the
tensors' bytes without holes (https://github.com/huggingface/safetensors). Bytes here are verified, never interpreted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like.api.weights import Manifest, TensorEntry
from areal_like.errors import WeightUpdateError
from areal_like.weights.manifest import ITEM_BYTES, ContentDigest

#: bytes read at a time
CHUNK_BYTES = 16 * 2**20
#: names shown of a longer list in an error
_SHOWN = 4
#: no header of a real model comes near
_MOST_HEADER = 100 * 2**20
#: names under which language models keep their head and the embedding that it may be tied to
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
#: safetensors' name of each dtype, in the order in which its own writer lays tensors out: all lie aligned
STORED_NAMES = {
    "int64": "I64",
    "float64": "F64",
    "float32": "F32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int16": "I16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_NAMED = {stored: name for name, stored in STORED_NAMES.items()}
#: hands out a tensor's bytes in order, piece by piece
Bytes = Callable[[TensorEntry], Iterator[memoryview]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor's bytes lie. ``dtype`` is torch's name; empty for one that torch's manifests do not know."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def chunks(self) -> Iterator[memoryview]:
        """Its bytes. Raises OSError, or EOFError where the file ends before."""
        with self.file.open("rb") as file:
            file.seek(self.offset)
            left = self.nbytes
            while left:
                data = file.read(min(left, CHUNK_BYTES))
                if not data:
                    raise EOFError(f"{self.file} ends {left} bytes too early")
                left -= len(data)
                yield memoryview(data)


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the safetensors files in ``folder``.

    Raises:
        WeightUpdateError: there are none, or one is no safetensors file.
    """
    found: dict[str, StoredTensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            found |= read_header(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WeightUpdateError(f"{path}: is no safetensors file: {error}") from error
    if not found:
        raise WeightUpdateError(f"{folder}: holds no safetensors files that can be read here")
    return found


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file. Raises OSError, ValueError, KeyError or TypeError for a broken one."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER:
            raise ValueError(f"a header of {length} bytes")
        header: dict[str, Any] = json.loads(file.read(length))
    start = 8 + length
    return {
        name: StoredTensor(
            file=path,
            dtype=_NAMED.get(entry["dtype"], ""),
            shape=tuple(map(int, entry["shape"])),
            offset=start + int(entry["data_offsets"][0]),
            nbytes=int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]),
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def write_file(path: Path, entries: Iterable[TensorEntry], content: Bytes) -> None:
    """One file with every tensor of ``entries``, verified while it is written. Large elements first: all lie aligned.

    Raises:
        WeightUpdateError: bytes do not have the digest that their entry says.
        OSError: the medium is full or gone.
    """
    ordered = sorted(entries, key=lambda entry: -ITEM_BYTES[entry.dtype])
    header: dict[str, dict[str, Any]] = {}
    end = 0
    for entry in ordered:
        offsets = [end, end + entry.nbytes]
        header[entry.name] = {"dtype": STORED_NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        end += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for entry in ordered:
            for chunk in verified(entry, content):
                file.write(chunk)


def verified(entry: TensorEntry, content: Bytes) -> Iterator[memoryview]:
    """The tensor's bytes; ends with an error unless they are those that ``entry`` describes.

    Raises:
        WeightUpdateError: they are not.
    """
    digest, count = ContentDigest(entry.dtype, entry.shape), 0
    for chunk in content(entry):
        digest.update(chunk)
        count += len(chunk)
        yield chunk
    found = digest.hexdigest()
    if count != entry.nbytes or found != entry.digest:
        raise WeightUpdateError(
            f"tensor {entry.name!r}: its {count} bytes have digest {found}, the manifest says {entry.digest} over "
            f"{entry.nbytes}; they were damaged or overwritten on the way"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What an update of a model must bring, whole: its checkpoint's tensors by name.

    ``optional`` may come or not: a tied head, which is another name of the embedding.
    """

    shapes: Mapping[str, tuple[int, ...]]
    optional: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, folder: Path, *, tied: bool) -> Expected:
        """Of the checkpoint in ``folder``. Raises WeightUpdateError where it cannot be read."""
        shapes = {name: stored.shape for name, stored in read_headers(folder).items()}
        optional: dict[str, tuple[int, ...]] = {}
        if tied and EMBEDDING in shapes:
            optional[HEAD] = shapes.pop(HEAD, shapes[EMBEDDING])
        return cls(shapes=shapes, optional=optional)

    def check(self, manifest: Manifest) -> None:
        """Raise unless ``manifest`` brings every tensor in its shape.

        Raises:
            WeightUpdateError: one is unknown, misshapen, missing, or no floating-point number; it is named. Or a tied
                head, which is not loaded, is another than the embedding.
        """
        where = f"version {manifest.version}"
        for entry in manifest.tensors:
            shape = self.shapes.get(entry.name, self.optional.get(entry.name))
            if shape is None:
                raise WeightUpdateError(
                    f"{where}: the model has no tensor {entry.name!r}; is it the same architecture?"
                )
            if shape != entry.shape:
                raise WeightUpdateError(
                    f"{where}: tensor {entry.name!r} has shape {entry.shape}, the model's is {shape}"
                )
            if "float" not in entry.dtype:
                raise WeightUpdateError(f"{where}: tensor {entry.name!r} has dtype {entry.dtype}, which is no weight")
        tied = {HEAD, EMBEDDING} if HEAD in self.optional else set()
        if len({(entry.digest, entry.dtype) for entry in manifest.tensors if entry.name in tied}) > 1:
            raise WeightUpdateError(
                f"{where}: {EMBEDDING!r} and {HEAD!r} are tied here, but the manifest has two contents; "
                "untie the model (tie_word_embeddings: false) or export one of them"
            )
        missing = sorted(self.shapes.keys() - {entry.name for entry in manifest.tensors})
        if missing:
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            shown = ", ".join(map(repr, missing[:_SHOWN]))
            raise WeightUpdateError(f"{where}: tensor {shown}{more} is missing; the exporter must yield every one")
