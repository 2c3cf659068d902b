"""Weights on their way into a worker: fetched and verified in the background, beside the live ones.

    idle --> staging --> staged --> (taken by the engine: applied)
                |           |
                +--> failed +--> discarded: idle

A thread that fetches cannot be stopped from outside while it waits for a trainer that hangs. It is never joined: each
staging has a number, and a thread whose number is over drops what it got. Whoever takes a version releases it.
Free of vLLM.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from areal_like.api.weights import Manifest
from areal_like.errors import ArealLikeError, StaleCommand, WeightUpdateError
from areal_like.inference.vllm_plugin.delivery import Delivery
from areal_like.inference.vllm_plugin.host_staging import HostStaging
from areal_like.inference.vllm_plugin.staged_copy import StagedCopy
from areal_like.weights.checkpoint import Expected
from areal_like.weights.manifest import check_manifest
from areal_like.weights.transports.base import stays_on_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A version, ready to be loaded: a ``copy`` whose bytes have the digests that the manifest says, or a
    ``delivery`` that brings them from GPU to GPU once the scheduler is paused, and is verified then.
    """

    manifest: Manifest
    seconds: float
    copy: StagedCopy = field(default_factory=StagedCopy)
    delivery: Delivery | None = None

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self.copy.tensors


class Receiver:
    """One worker's staging. Methods are called by the worker's thread; ``staged`` and ``error`` come from another."""

    def __init__(
        self,
        device: torch.device | None = None,
        deliver: Callable[[Manifest], Delivery] | None = None,
        host: HostStaging | None = None,
    ) -> None:
        """``device``: where the worker computes. ``deliver``: how a version comes from GPU to GPU; ``host``: how it
        comes through host memory (one thread and pageable memory without).
        """
        self._device = device
        self._deliver = deliver
        self._host = host or HostStaging()
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
        staged, delivery = self._clear()
        if delivery is not None:
            delivery.leave()
        if staged is not None:
            staged.copy.release()

    def close(self) -> None:
        """Forget what is staged, and give the memory back that is kept over versions."""
        self.discard()
        self._host.close()

    def _clear(self) -> tuple[Staged | None, Delivery | None]:
        with self._lock:
            self._number += 1
            staged, self._staged = self._staged, None
            self._manifest = None
            self._error = ""
            delivery, self._delivery = self._delivery, None
            return staged, delivery

    def _delivery_of(self, manifest: Manifest) -> Delivery | None:
        if not stays_on_gpus(manifest):
            return None
        if self._deliver is None:
            raise WeightUpdateError(f"version {manifest.version} comes from GPU to GPU, and this server has no GPU")
        return self._deliver(manifest)

    def _fetch(self, manifest: Manifest, number: int, delivery: Delivery | None) -> None:
        started = time.perf_counter()
        copy = StagedCopy()
        error = ""
        try:
            if self._device is not None and self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # each thread has a current device of its own
            if delivery is not None:
                delivery.prepare()
            else:
                copy = self._host.fetch(manifest, lambda: self._number != number)
        except ArealLikeError as failure:
            error = str(failure)
        except Exception as failure:  # the thread's last frame: what is not caught here would be lost
            error = f"{type(failure).__name__}: {failure}"
        with self._lock:
            wanted = self._number == number
            if wanted and error:
                self._error = f"version {manifest.version}: {error}"
            elif wanted:
                seconds = time.perf_counter() - started
                self._staged = Staged(manifest=manifest, seconds=seconds, copy=copy, delivery=delivery)
        if not wanted:
            copy.release()
