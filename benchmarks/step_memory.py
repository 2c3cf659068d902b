"""Memory of a train step: what it holds from beginning to end, and what it holds above that at its peak."""

from __future__ import annotations

import resource
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: bytes of a float32 number, and of AdamW's two moments
_FLOAT32, _MOMENTS = 4, 8


class LiveBytes(TorchDispatchMode):
    """Bytes of tensors made inside, while they live; for devices that do not count for us."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, sum(self.live.values()))
        return out

    def _count(self, storage: Any) -> None:
        if storage.data_ptr() not in self.live:
            self.live[storage.data_ptr()] = storage.nbytes()
            self.largest = max(self.largest, storage.nbytes())
            weakref.finalize(storage, self.live.pop, storage.data_ptr(), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """Bytes that a step holds from beginning to end: weights in every dtype that it keeps them in, a whole set of

    gradients, and the optimiser's state. Every way to train has these, in sizes that follow from its dtypes.
    """

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def resident(what: str, dtype: torch.dtype, parameters: int, *, optimizer: bool = True, shards: int = 1) -> Resident:
    """Of a way to train (see ``Request.what``) on ``parameters`` weights, computing in ``dtype``; on each of ``shards``

    ranks that share one model. A copy of float32 weights in ``dtype``, which we keep and autocast makes anew in every
    forward pass and keeps for the backward pass, counts as weights in both; what shards gather for a layer does not.
    """
    size = dtype.itemsize
    copies = 0 if dtype == torch.float32 or shards > 1 else size
    weights = size if what == "hf" else _FLOAT32 + copies
    gradients = size if what in ("hf", "hf-masters") else _FLOAT32
    moments = _MOMENTS if optimizer and what != "hf" else 0
    own = parameters // shards
    return Resident(weights=weights * own, gradients=gradients * own, optimizer=moments * own)


def memory_on_cuda(held: Resident) -> dict[str, Any]:
    """Of what ran since the device's peak was reset."""
    return _figures(held, torch.cuda.max_memory_allocated())


def memory_on_cpu(held: Resident, update: Callable[[], Any]) -> dict[str, Any]:
    """Of one more ``update``, which has run before. Every tensor is counted as it is made, gradients among them."""
    with LiveBytes() as mode:
        update()
    return _figures(held, mode.peak + held.total - held.gradients) | {
        "largest_tensor_gb": mode.largest / 1e9,
        "process_peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def _figures(held: Resident, peak: int) -> dict[str, Any]:
    sizes = {name: count / 1e9 for name, count in asdict(held).items()}
    return {"peak_gb": peak / 1e9, "above_resident_gb": (peak - held.total) / 1e9, "resident_gb": sizes}
