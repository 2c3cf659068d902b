"""How a verified version gets into an SGLang server: from a folder, or over a process group (``sglang_group``)."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping
from typing import Protocol

from areal_like.api.weights import Manifest, TensorEntry
from areal_like.errors import RequestError, WeightUpdateError
from areal_like.inference.backends.http_control import EngineHttp
from areal_like.inference.backends.sglang_server import ServerFacts
from areal_like.weights.checkpoint import Bytes
from areal_like.weights.views import FolderView, open_view

#: what SGLang says before it has touched anything
_BEFORE_LOADING = ("weights iterator", "Failed to get model loader", "not supported")
#: parts of a checkpoint that SGLang keeps as one tensor, in order
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
#: hexadecimal characters of SGLang's checksums: the first eight bytes of a SHA-256
CHECKSUM_CHARACTERS = 16


class Refused(WeightUpdateError):
    """The server did not begin: its live weights are as before."""


class Load(Protocol):
    """One server's way for new weights. ``checksums``: of live tensors, by their live names, as far as known."""

    @property
    def checksums(self) -> Mapping[str, str]: ...

    async def stage(self, manifest: Manifest, facts: ServerFacts, http: EngineHttp) -> None:
        """Verify and make ready; what was ready before is forgotten. Raises WeightUpdateError."""
        ...

    async def apply(self, http: EngineHttp, label: str, *, flush: bool, timeout: float) -> None:
        """Load what is ready into the paused server, and label it.

        Raises:
            Refused: nothing was touched.
            WeightUpdateError, RequestError, ServerUnavailable: nobody knows what the live weights are.
        """
        ...

    async def aclose(self) -> None: ...


class FolderLoad:
    """``update_weights_from_disk`` of a folder: of a snapshot (disk) or of one in shared memory (shm)."""

    def __init__(self, reader: str) -> None:
        """``reader``: the server's name; its folder is its own."""
        self._reader = reader
        self._view: FolderView | None = None
        self._checksums: Mapping[str, str] = {}

    @property
    def checksums(self) -> Mapping[str, str]:
        return self._checksums

    async def stage(self, manifest: Manifest, facts: ServerFacts, http: EngineHttp) -> None:
        del http
        await self.aclose()
        view = await asyncio.to_thread(open_view, manifest, self._reader)
        self._view = view
        comparable = facts.device == "cpu" and facts.ranks == 1
        same = [entry for entry in manifest.tensors if entry.dtype == facts.dtype] if comparable else []
        self._checksums = await asyncio.to_thread(live_checksums, same, view.content)

    async def apply(self, http: EngineHttp, label: str, *, flush: bool, timeout: float) -> None:
        view = self._view
        if view is None:
            raise Refused("nothing is staged")
        body = {
            "model_path": str(view.folder),
            "load_format": "safetensors",
            "weight_version": label,
            "flush_cache": flush,  # its default answers "failed" under in_place, although the weights changed
        }
        try:
            answer = await http.post("/update_weights_from_disk", body, timeout=timeout)
        except RequestError as error:
            if any(words in str(error) for words in _BEFORE_LOADING):
                raise Refused(str(error)) from error
            raise WeightUpdateError(str(error)) from error
        if not (answer or {}).get("success"):
            raise WeightUpdateError(f"/update_weights_from_disk: {answer}")
        await self.aclose()

    async def aclose(self) -> None:
        view, self._view = self._view, None
        if view is not None:
            await asyncio.to_thread(view.remove)


def live_members(entries: Iterable[TensorEntry]) -> dict[str, tuple[TensorEntry, ...]]:
    """SGLang's live tensors that are made of these, by their names there: one, or the parts of a fusion in order."""
    by_name = {entry.name: entry for entry in entries}
    members: dict[str, tuple[TensorEntry, ...]] = {name: (entry,) for name, entry in by_name.items()}
    for whole, names in _FUSED.items():
        for first in by_name:
            if f".{names[0]}." not in first:
                continue
            found = [by_name.get(first.replace(f".{names[0]}.", f".{name}.")) for name in names]
            parts = tuple(part for part in found if part is not None)
            if len(parts) == len(names):
                members[first.replace(f".{names[0]}.", f".{whole}.")] = parts
                for part in parts:
                    members.pop(part.name, None)
    return members


def live_checksums(entries: Iterable[TensorEntry], content: Bytes) -> dict[str, str]:
    """SGLang's checksums (on a CPU) of the tensors that these become, by their names there."""
    return {name: _checksum(parts, content) for name, parts in live_members(entries).items()}


def _checksum(parts: Iterable[TensorEntry], content: Bytes) -> str:
    state = hashlib.sha256()
    for part in parts:
        for chunk in content(part):
            state.update(chunk)
    return state.hexdigest()[:CHECKSUM_CHARACTERS]
