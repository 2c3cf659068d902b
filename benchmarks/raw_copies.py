"""What the hardware does with the bytes of an update: copies on a device, over the bus, in memory, to a disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch

#: host and disk readings move at most this much, and are scaled up
_MOST_HOST_BYTES = 2 * 2**30
#: so small a piece of a disk is written at a time
_PIECE = 64 * 2**20


def raw_readings(weights: Iterable[torch.Tensor], folder: Path, times: int = 3) -> dict[str, dict[str, float]]:
    """Median seconds for the bytes of ``weights``, and bytes/s, by kind of copy. ``folder`` is on the disk measured."""
    tensors = list(weights)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    seconds = copy_seconds(tensors, times)
    each = {"seconds": seconds, "bytes_per_second": nbytes / seconds, "bytes_moved": nbytes}
    found = {"copy, tensor by tensor": each}
    part = min(nbytes, _MOST_HOST_BYTES)
    if tensors[0].device.type == "cuda":
        here = torch.empty(part, dtype=torch.uint8, device=tensors[0].device)
        pinned = torch.empty(part, dtype=torch.uint8, pin_memory=True)
        found["device to pinned host"] = _reading(nbytes, part, lambda: pinned.copy_(here), times)
        del here, pinned
    source, target = (torch.ones(part, dtype=torch.uint8) for _ in range(2))
    found["host to host"] = _reading(nbytes, part, lambda: target.copy_(source), times)
    found["write to disk, flushed"] = _reading(nbytes, part, lambda: _write(source, folder / "raw"), min(times, 2))
    return found


def copy_seconds(weights: Iterable[torch.Tensor], times: int) -> float:
    """Median seconds to copy every tensor into one that is there already, on the same device."""
    tensors = list(weights)
    targets = [torch.zeros_like(tensor) for tensor in tensors]

    def copy() -> None:
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor)

    nbytes = sum(tensor.nbytes for tensor in tensors)
    return _reading(nbytes, nbytes, copy, times)["seconds"]


def _reading(nbytes: int, moved: int, work: Callable[[], Any], times: int) -> dict[str, float]:
    work()
    _wait()
    readings = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        _wait()
        readings.append(time.perf_counter() - began)
    rate = moved / median(readings)
    return {"seconds": nbytes / rate, "bytes_per_second": rate, "bytes_moved": moved}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _write(source: torch.Tensor, path: Path) -> None:
    data = source.numpy().data
    try:
        with path.open("wb") as file:
            for start in range(0, len(data), _PIECE):
                file.write(data[start : start + _PIECE])
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)
