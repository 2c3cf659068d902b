"""A manifest's digest, and what must hold of a manifest before its bytes are touched. Torch-free."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

from areal_like.api.weights import Manifest, TensorEntry, TransportKind
from areal_like.errors import WeightUpdateError

#: hexadecimal characters kept of a SHA-256: 128 bits, far beyond accidents
DIGEST_CHARACTERS = 32

#: bytes of one element, by torch's name of the dtype: what may travel
ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}


class ContentDigest:
    """Digest of one tensor, fed with its bytes in memory order; sensitive to dtype and shape as well."""

    def __init__(self, dtype: str, shape: Sequence[int]) -> None:
        self._state = hashlib.sha256(f"{dtype}{list(shape)}|".encode())

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self._state.update(data)

    def hexdigest(self) -> str:
        return self._state.hexdigest()[:DIGEST_CHARACTERS]


def manifest_digest(entries: Iterable[TensorEntry]) -> str:
    """Digest of the ordered entries: name, dtype, shape and content digest of each, unambiguously joined."""
    state = hashlib.sha256()
    for entry in entries:
        for text in (entry.name, entry.dtype, ",".join(map(str, entry.shape)), entry.digest):
            data = text.encode()
            state.update(len(data).to_bytes(8, "little"))
            state.update(data)
    return state.hexdigest()[:DIGEST_CHARACTERS]


def make_manifest(
    version: int, incarnation: int, transport: TransportKind, location: str, entries: Iterable[TensorEntry]
) -> Manifest:
    """A manifest whose digest fits its entries."""
    tensors = tuple(entries)
    return Manifest(
        version=version,
        incarnation=incarnation,
        transport=transport,
        location=location,
        tensors=tensors,
        digest=manifest_digest(tensors),
    )


def check_manifest(manifest: Manifest) -> None:
    """Raise unless the manifest agrees with itself.

    Raises:
        WeightUpdateError: no tensors, a name twice, an unknown dtype, a size that does not follow from the shape,
            or a digest that does not cover the entries.
    """
    where = f"manifest of version {manifest.version}"
    if not manifest.tensors:
        raise WeightUpdateError(f"{where}: lists no tensors; the exporter must yield every weight")
    seen: set[str] = set()
    for entry in manifest.tensors:
        if entry.name in seen:
            raise WeightUpdateError(f"{where}: tensor {entry.name!r} is listed twice")
        seen.add(entry.name)
        if entry.dtype not in ITEM_BYTES:
            raise WeightUpdateError(
                f"{where}: tensor {entry.name!r} has dtype {entry.dtype!r}; known are {', '.join(ITEM_BYTES)}"
            )
        expected = math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
        if entry.nbytes != expected or any(n < 0 for n in entry.shape):
            raise WeightUpdateError(
                f"{where}: tensor {entry.name!r} of shape {entry.shape} and dtype {entry.dtype} has {expected} bytes, "
                f"the manifest says {entry.nbytes}"
            )
    if manifest.digest != manifest_digest(manifest.tensors):
        raise WeightUpdateError(f"{where}: its digest does not cover its entries; it was altered on the way")
