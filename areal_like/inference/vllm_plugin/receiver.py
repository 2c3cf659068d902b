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
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from areal_like.api.weights import Manifest
from areal_like.errors import ArealLikeError, StaleCommand, WeightUpdateError
from areal_like.inference.vllm_plugin.delivery import Delivery
from areal_like.weights.checkpoint import Expected
from areal_like.weights.digest import parse_dtype, tensor_digest
from areal_like.weights.manifest import check_manifest
from areal_like.weights.transports.base import make_reader, stays_on_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A version, ready to be loaded: ``tensors`` whose bytes have the digests that the manifest says, or a
    ``delivery`` that brings them from GPU to GPU once the scheduler is paused, and is verified then.
    """

    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]
    seconds: float
    delivery: Delivery | None = None


class Receiver:
    """One worker's staging. Methods are called by the worker's thread; ``staged`` and ``error`` come from another."""

    def __init__(
        self, device: torch.device | None = None, deliver: Callable[[Manifest], Delivery] | None = None
    ) -> None:
        """``device``: where the worker computes. ``deliver``: how a version comes from GPU to GPU."""
        self._device = device
        self._deliver = deliver
        self._delivery: Delivery | None = None
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
        delivery = self._delivery_of(manifest)
        with self._lock:
            self._manifest, self._delivery = manifest, delivery
            number = self._number
        arguments = (manifest, number, delivery)
        threading.Thread(target=self._fetch, args=arguments, name="stage-weights", daemon=True).start()

    def take(self) -> Staged:
        """What is staged; it is no longer ours.

        Raises:
            WeightUpdateError: nothing is.
        """
        with self._lock:
            staged, error = self._staged, self._error
        if staged is None:
            raise WeightUpdateError(error or f"no version is staged: {self.state}")
        self._clear()
        return staged

    def discard(self) -> None:
        """Forget what is staged or being staged; a thread that still fetches ends for itself."""
        delivery = self._clear()
        if delivery is not None:
            delivery.leave()

    def _clear(self) -> Delivery | None:
        with self._lock:
            self._number += 1
            self._manifest = self._staged = None
            self._error = ""
            delivery, self._delivery = self._delivery, None
            return delivery

    def _delivery_of(self, manifest: Manifest) -> Delivery | None:
        if not stays_on_gpus(manifest):
            return None
        if self._deliver is None:
            raise WeightUpdateError(f"version {manifest.version} comes from GPU to GPU, and this server has no GPU")
        return self._deliver(manifest)

    def _fetch(self, manifest: Manifest, number: int, delivery: Delivery | None) -> None:
        started = time.perf_counter()
        tensors: Mapping[str, torch.Tensor] = {}
        error = ""
        try:
            if self._device is not None and self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # each thread has a current device of its own
            if delivery is not None:
                delivery.prepare()
            else:
                tensors = self._read(manifest, number)
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
                seconds = time.perf_counter() - started
                self._staged = Staged(manifest=manifest, tensors=tensors, seconds=seconds, delivery=delivery)

    def _read(self, manifest: Manifest, number: int) -> Mapping[str, torch.Tensor]:
        """Every tensor in host memory, verified; some of them where nobody wants them any more.

        Raises:
            WeightUpdateError: one is damaged, or the source is gone.
        """
        tensors: dict[str, torch.Tensor] = {}
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
                    break
        return tensors
