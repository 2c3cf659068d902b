"""Weights that come from GPU to GPU while the scheduler is paused: what can be done before, and how they are taken.

Free of vLLM. Host transports bring tensors beside the live ones (``receiver``); here nothing lies beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from areal_like.api.weights import Manifest, TransportKind
from areal_like.errors import WeightUpdateError
from areal_like.weights.nccl import Group
from areal_like.weights.transports.ipc import SharedBuckets, gpu_name
from areal_like.weights.transports.seat import Membership, Seat

#: what bytes are taken from: a group that broadcasts them, or the trainer's buckets on this GPU
Source = Group | SharedBuckets


class Delivery(Protocol):
    """One version, on its way."""

    def prepare(self) -> None:
        """Whatever can be done while generation goes on. Blocks. Raises WeightUpdateError."""
        ...

    def receive(self, take: Callable[[Source], None]) -> None:
        """Call ``take`` once the bytes come; again, if it raised GroupBroken and the others meet again.

        Raises:
            WeightUpdateError: they do not come.
            Exception: whatever else ``take`` raised.
        """
        ...

    def leave(self) -> None:
        """Give it up, or let go of what it held. Idempotent; may be called from another thread."""
        ...


def open_delivery(manifest: Manifest, membership: Callable[[], Membership], device: torch.device) -> Delivery:
    """How ``manifest`` will come. ``membership``: this worker's, made when it is first needed.

    Raises:
        WeightUpdateError: its location makes no sense, or it lies on another GPU.
    """
    if manifest.transport is TransportKind.IPC:
        return SharedDelivery(SharedBuckets.parse(manifest.location), device)
    if manifest.transport is TransportKind.COLLECTIVE:
        return Seat(manifest, membership())
    raise WeightUpdateError(f"version {manifest.version}: transport {manifest.transport} brings no GPU digests")


class SharedDelivery:
    """:class:`Delivery` on one GPU. The trainer's memory stays mapped from ``prepare`` to ``leave``."""

    def __init__(self, shared: SharedBuckets, device: torch.device) -> None:
        self._shared, self._device = shared, device
        self._mapped: Sequence[Any] = ()
        self._left = False
        shared.check_gpu(gpu_name(device))

    def prepare(self) -> None:
        mapped = [handle.open(self._device) for handle in self._shared.buckets]
        if not self._left:
            self._mapped = mapped

    def receive(self, take: Callable[[Source], None]) -> None:
        try:
            take(self._shared)
        finally:
            self.leave()

    def leave(self) -> None:
        self._left = True
        self._mapped = ()
