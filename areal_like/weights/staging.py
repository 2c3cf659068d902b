"""A server's side of an update: weights arrive in a second buffer, are verified there, and only then become live.

Ties: live names that share storage form one *place*. A place is transferred once, whichever of its names the manifest
lists, and every view of it changes at the commit.

What a receipt's digest proves: :meth:`StagedWeights.digest` reads the live tensors again. Where a live tensor has
the dtype that travelled, its own digest enters. Where it has another (a bf16 server fed with float32), the digest of
the live bytes is compared with that of the cast of the verified bytes, taken when they were staged: only if the two
are equal does the travelled digest enter, else the live one. Either way the result equals the manifest's digest
exactly when every live tensor holds what was published.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from areal_like.api.weights import Manifest, TensorEntry
from areal_like.errors import WeightUpdateError
from areal_like.weights.adapters import adapter_pairs, add_adapter, is_adapter
from areal_like.weights.digest import dtype_name, parse_dtype, tensor_digest, tensor_entry
from areal_like.weights.manifest import DIGEST_CHARACTERS, check_manifest, manifest_digest
from areal_like.weights.transports.base import WeightReader, make_reader

_K = TypeVar("_K")
_V = TypeVar("_V")

#: names shown of a longer list in an error
_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """``bytes`` that were transferred (a tie once), in ``seconds``."""

    version: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A manifest, the place that each of its entries fills or changes, and for places that do not hold what travelled
    as it travelled (another dtype; a sum with an adapter), the digest that they must have.
    """

    manifest: Manifest
    cast_digests: Mapping[int, str]
    place_of: Mapping[str, int]


class StagedWeights:
    """The live tensors of a model and the buffer beside them.

    ``stage`` may run in a thread while generation goes on; ``commit`` must not run beside a forward pass. One of the
    two at a time: a second caller is refused, never queued.
    """

    def __init__(self, live: Mapping[str, torch.Tensor]) -> None:
        """``live``: every tensor of the model by its exported name, tied names included."""
        if not live:
            raise ValueError("StagedWeights needs the model's tensors, got an empty mapping")
        self._live = dict(live)
        self._places = _group_by_storage(self._live)
        self._place_of = {name: i for i, names in enumerate(self._places) for name in names}
        self._buffers: dict[int, torch.Tensor] = {}
        self._bases: dict[int, torch.Tensor] = {}
        self._touched: tuple[int, ...] = ()
        self._staged: _Held | None = None
        self._committed: _Held | None = None
        self._report: StageReport | None = None
        self._busy = threading.Lock()
        self._discards = 0

    @property
    def staged_version(self) -> int | None:
        """The version that waits for its commit."""
        return self._staged.manifest.version if self._staged else None

    @property
    def report(self) -> StageReport | None:
        """Figures of the last successful staging."""
        return self._report

    def stage(self, manifest: Manifest) -> StageReport:
        """Fetch and verify ``manifest`` beside the live tensors, which stay as they are.

        Raises:
            WeightUpdateError: a tensor is missing, unknown, misshapen or damaged (it is named), the source is gone
                or was overwritten, or another staging runs. Nothing is staged then.
        """
        started = time.perf_counter()
        with self._exclusively("stage"):
            _use_device(next(iter(self._live.values())).device)
            self._staged = None
            check_manifest(manifest)
            if any(is_adapter(entry.name) for entry in manifest.tensors):
                nbytes, self._staged = self._stage_adapters(manifest)
            else:
                nbytes, self._staged = self._stage_whole(manifest)
        self._report = StageReport(version=manifest.version, bytes=nbytes, seconds=time.perf_counter() - started)
        return self._report

    def _stage_whole(self, manifest: Manifest) -> tuple[int, _Held]:
        sources = self._match(manifest)
        casts: dict[int, str] = {}
        with make_reader(manifest) as reader:
            for place, entry in self._unless_discarded(manifest, sources):
                self._fetch(reader, place, entry, casts)
        self._touched = tuple(sources)
        held = _Held(manifest=manifest, cast_digests=casts, place_of=self._place_of)
        return sum(entry.nbytes for entry in sources.values()), held

    def _stage_adapters(self, manifest: Manifest) -> tuple[int, _Held]:
        """Base + B · A of every layer named; all other live tensors stay the base that they are."""
        pairs = adapter_pairs(manifest.tensors, self._live)
        casts: dict[int, str] = {}
        place_of: dict[str, int] = {}
        with make_reader(manifest) as reader:
            for target, (a, b) in self._unless_discarded(manifest, pairs):
                place = self._place_of[target]
                merged = add_adapter(self._base(place), _read(reader, a), _read(reader, b))
                casts[place] = tensor_digest(self._buffer(place).copy_(merged), a.digest)
                place_of |= {a.name: place, b.name: place}
        gone = [self._places[place][0] for place in self._bases if place not in casts]
        if gone:
            raise WeightUpdateError(
                f"version {manifest.version}: tensor {_listed(gone)} had an adapter before and has none now; "
                "publish the same layers every time"
            )
        self._touched = tuple(casts)
        held = _Held(manifest=manifest, cast_digests=casts, place_of=place_of)
        return manifest.total_bytes, held

    def _base(self, place: int) -> torch.Tensor:
        """The weight without its adapter: what was live when the first adapter arrived."""
        if place not in self._bases:
            self._bases[place] = self._live[self._places[place][0]].clone()
        return self._bases[place]

    def _unless_discarded(self, manifest: Manifest, parts: Mapping[_K, _V]) -> Iterator[tuple[_K, _V]]:
        discards = self._discards
        for part in parts.items():
            if self._discards != discards:
                raise WeightUpdateError(f"version {manifest.version}: staging was discarded")
            yield part

    def commit(self, version: int) -> None:
        """Copy what is staged into the live tensors, in place. Committing the live version again does nothing.

        Raises:
            WeightUpdateError: ``version`` is not what is staged. The live tensors are as before.
        """
        with self._exclusively("commit"):
            staged = self._staged
            if staged is None and self._committed is not None and self._committed.manifest.version == version:
                return
            if staged is None or staged.manifest.version != version:
                raise WeightUpdateError(
                    f"commit of version {version}: staged is {self.staged_version}; stage the version first"
                )
            self._staged = None
            self._committed = staged  # before the copy: a copy that fails half-way must not pass digest()
            with torch.inference_mode():
                for place in self._touched:
                    for tensor in self._tensors(place):
                        tensor.copy_(self._buffers[place])
            if not any(is_adapter(entry.name) for entry in staged.manifest.tensors):
                self._bases.clear()  # the whole weights that are live now are what adapters will be added to

    def discard(self) -> None:
        """Forget what is staged; a staging under way ends with an error at its next tensor."""
        self._discards += 1
        self._staged = None

    def digest(self) -> str:
        """Digest of what the live tensors hold now, over the entries of the committed manifest.

        Equals the manifest's digest exactly when every live tensor holds what was published. Before the first
        commit it covers the live tensors by name.
        """
        held = self._committed
        if held is None:
            return manifest_digest(tensor_entry(name, tensor) for name, tensor in self._live.items())
        like = held.manifest.tensors[0].digest
        digests = {place: self._place_digest(place, like) for place in range(len(self._places))}
        entries: list[TensorEntry] = []
        for entry in held.manifest.tensors:
            place = held.place_of[entry.name]
            live = digests[place]
            cast_held = held.cast_digests.get(place) == live
            entries.append(entry.model_copy(update={"digest": entry.digest if cast_held else live}))
        return manifest_digest(entries)

    def _place_digest(self, place: int, like: str) -> str:
        found = [tensor_digest(tensor, like) for tensor in self._tensors(place)]
        if len(set(found)) == 1:
            return found[0]
        # the tie broke and its views differ now: a digest that no single tensor has
        return hashlib.sha256("|".join(found).encode()).hexdigest()[:DIGEST_CHARACTERS]

    def _tensors(self, place: int) -> list[torch.Tensor]:
        """The distinct storages behind a place: one, unless someone broke a tie after construction."""
        tensors = {_storage_key(self._live[name]): self._live[name] for name in self._places[place]}
        return list(tensors.values())

    def _match(self, manifest: Manifest) -> dict[int, TensorEntry]:
        """The entry from which each place is filled."""
        where = f"version {manifest.version}"
        extra = [entry.name for entry in manifest.tensors if entry.name not in self._place_of]
        if extra:
            raise WeightUpdateError(f"{where}: the model has no tensor {_listed(extra)}; is it the same architecture?")
        sources: dict[int, TensorEntry] = {}
        for entry in manifest.tensors:
            self._check_entry(where, entry)
            first = sources.setdefault(self._place_of[entry.name], entry)
            if (first.digest, first.dtype) != (entry.digest, entry.dtype):
                raise WeightUpdateError(
                    f"{where}: {first.name!r} and {entry.name!r} are tied here, but the manifest has two contents; "
                    "untie the model (tie_word_embeddings: false) or export one of them"
                )
        missing = [names[0] for place, names in enumerate(self._places) if place not in sources]
        if missing:
            raise WeightUpdateError(f"{where}: tensor {_listed(missing)} is missing; the exporter must yield every one")
        return sources

    def _check_entry(self, where: str, entry: TensorEntry) -> None:
        live = self._live[entry.name]
        if tuple(live.shape) != entry.shape:
            raise WeightUpdateError(
                f"{where}: tensor {entry.name!r} has shape {entry.shape}, the model's is {tuple(live.shape)}"
            )
        dtype = parse_dtype(entry.dtype)
        if dtype != live.dtype and not (dtype.is_floating_point and live.dtype.is_floating_point):
            raise WeightUpdateError(
                f"{where}: tensor {entry.name!r} has dtype {entry.dtype}, the model's is {dtype_name(live.dtype)}; "
                "only floating-point dtypes are cast into each other"
            )

    def _fetch(self, reader: WeightReader, place: int, entry: TensorEntry, casts: dict[int, str]) -> None:
        """Transfer into the place's buffer. The private copy is verified, so nothing can change in between."""
        buffer = self._buffer(place)
        dtype = parse_dtype(entry.dtype)
        direct = buffer.dtype == dtype and buffer.device.type == reader.device.type
        received = buffer if direct else torch.empty(entry.shape, dtype=dtype, device=reader.device)
        reader.read_into(entry, received)
        _verify(entry, received)
        if not direct:
            buffer.copy_(received)
        if buffer.dtype != dtype:
            casts[place] = tensor_digest(buffer, entry.digest)

    def _buffer(self, place: int) -> torch.Tensor:
        """Allocated at first use and kept: memory stays flat over updates."""
        if place not in self._buffers:
            live = self._live[self._places[place][0]]
            self._buffers[place] = torch.empty(live.shape, dtype=live.dtype, device=live.device)
        return self._buffers[place]

    @contextmanager
    def _exclusively(self, what: str) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise WeightUpdateError(f"{what}: another stage or commit runs on this server; wait for it or discard it")
        try:
            yield
        finally:
            self._busy.release()


def _use_device(device: torch.device) -> None:
    """Staging runs in a thread of its own, and each has a current CUDA device: groups over NCCL receive there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _read(reader: WeightReader, entry: TensorEntry) -> torch.Tensor:
    """A verified private copy where the reader reads."""
    received = torch.empty(entry.shape, dtype=parse_dtype(entry.dtype), device=reader.device)
    reader.read_into(entry, received)
    _verify(entry, received)
    return received


def _verify(entry: TensorEntry, received: torch.Tensor) -> None:
    found = tensor_digest(received, entry.digest)
    if found != entry.digest:
        raise WeightUpdateError(
            f"tensor {entry.name!r}: its bytes have digest {found}, the manifest says {entry.digest}; "
            "they were damaged or overwritten on the way"
        )


def _storage_key(tensor: torch.Tensor) -> tuple[object, ...]:
    if tensor.numel() == 0:
        return (id(tensor),)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _group_by_storage(live: Mapping[str, torch.Tensor]) -> tuple[tuple[str, ...], ...]:
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in live.items():
        groups.setdefault(_storage_key(tensor), []).append(name)
    return tuple(tuple(names) for names in groups.values())


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(map(repr, names[:_SHOWN])) + (f" and {rest} more" if rest > 0 else "")
