"""Weights on their way into a worker: fetched and verified in the background, beside the live ones.

    idle --> staging --> staged --> (taken by the engine: applied)
                |           |
                +--> failed +--> discarded: idle

A thread that fetches cannot be stopped from outside while it waits for a trainer that hangs. It is never joined: each
staging has a number, and a thread whose number is over drops what it got. Free of vLLM.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from areal_like.api.weights import Manifest
from areal_like.errors import ArealLikeError, StaleCommand, WeightUpdateError
from areal_like.weights.checkpoint import Expected
from areal_like.weights.digest import parse_dtype, tensor_digest
from areal_like.weights.manifest import check_manifest
from areal_like.weights.transports.base import make_reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A verified version, ready to be loaded: each tensor's bytes have the digest that the manifest says."""

    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]
    seconds: float


class Receiver:
    """One worker's staging. Methods are called by the worker's thread; ``staged`` and ``error`` come from another."""

    def __init__(self, device: torch.device | None = None) -> None:
        """``device``: where the worker computes; collective groups over NCCL receive there."""
        self._device = device
        self._lock = threading.Lock()
        self._number = 0
        self._manifest: Manifest | None = None
        self._staged: Staged | None = None
        self._error = ""

    @property
    def state(self) -> str:
        """idle, staging, staged or failed."""
        with self._lock:
            if self._error:
                return "failed"
            if self._staged is not None:
                return "staged"
            return "idle" if self._manifest is None else "staging"

    @property
    def error(self) -> str:
        with self._lock:
            return self._error

    @property
    def manifest(self) -> Manifest | None:
        """What is being staged or is staged."""
        with self._lock:
            return self._manifest

    @property
    def staged(self) -> Staged | None:
        with self._lock:
            return self._staged

    def stage(self, manifest: Manifest, expected: Expected, *, newest: tuple[int, int]) -> None:
        """Check ``manifest`` and fetch it in the background.

        Raises:
            WeightUpdateError: it contradicts itself or the model. Nothing was fetched.
            StaleCommand: ``newest`` (incarnation, version) was loaded already, and is newer.
        """
        self.discard()
        if (manifest.incarnation, manifest.version) < newest:
            raise StaleCommand(f"version {manifest.version} of {manifest.incarnation} after {newest[1]} of {newest[0]}")
        check_manifest(manifest)
        expected.check(manifest)
        with self._lock:
            self._manifest = manifest
            number = self._number
        threading.Thread(target=self._fetch, args=(manifest, number), name="stage-weights", daemon=True).start()

    def take(self) -> Staged:
        """What is staged; it is no longer ours.

        Raises:
            WeightUpdateError: nothing is.
        """
        with self._lock:
            staged, error = self._staged, self._error
        if staged is None:
            raise WeightUpdateError(error or f"no version is staged: {self.state}")
        self.discard()
        return staged

    def discard(self) -> None:
        """Forget what is staged or being staged; a thread that still fetches ends for itself."""
        with self._lock:
            self._number += 1
            self._manifest = self._staged = None
            self._error = ""

    def _fetch(self, manifest: Manifest, number: int) -> None:
        started = time.perf_counter()
        tensors: dict[str, torch.Tensor] = {}
        error = ""
        try:
            if self._device is not None and self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # each thread has a current device of its own
            with make_reader(manifest) as reader:
                for entry in manifest.tensors:
                    target = torch.empty(entry.shape, dtype=parse_dtype(entry.dtype))
                    reader.read_into(entry, target)
                    found = tensor_digest(target)
                    if found != entry.digest:
                        raise WeightUpdateError(
                            f"tensor {entry.name!r}: its bytes have digest {found}, the manifest says {entry.digest}; "
                            "they were damaged or overwritten on the way"
                        )
                    tensors[entry.name] = target
                    if self._number != number:
                        return
        except ArealLikeError as failure:
            error = str(failure)
        except Exception as failure:  # the thread's last frame: what is not caught here would be lost
            error = f"{type(failure).__name__}: {failure}"
        with self._lock:
            if self._number != number:
                return
            if error:
                self._error = f"version {manifest.version}: {error}"
            else:
                self._staged = Staged(manifest=manifest, tensors=tensors, seconds=time.perf_counter() - started)
