"""Adapters among published tensors: ``<layer>.lora_A`` [r, in] and ``<layer>.lora_B`` [out, r] stand for W + B · A."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from areal_like.api.weights import TensorEntry
from areal_like.errors import WeightUpdateError

ADAPTER_A, ADAPTER_B = ".lora_A", ".lora_B"


def is_adapter(name: str) -> bool:
    return name.endswith((ADAPTER_A, ADAPTER_B))


def add_adapter(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``base`` [out, in] + b · a in the dtype of ``base``; summed in float32 (float64 for float64), rounded once."""
    dtype = torch.float64 if base.dtype == torch.float64 else torch.float32
    return torch.addmm(base.to(dtype), b.to(base.device, dtype), a.to(base.device, dtype)).to(base.dtype)


def adapter_pairs(
    entries: Iterable[TensorEntry], live: Mapping[str, torch.Tensor]
) -> dict[str, tuple[TensorEntry, TensorEntry]]:
    """A and B by the name of the live tensor that they change.

    Raises:
        WeightUpdateError: a tensor that is no adapter, half a pair, or a pair that does not fit its layer.
    """
    by_name = {entry.name: entry for entry in entries}
    pairs: dict[str, tuple[TensorEntry, TensorEntry]] = {}
    for name in by_name:
        layer = name.removesuffix(ADAPTER_A).removesuffix(ADAPTER_B)
        target = f"{layer}.weight"
        if not is_adapter(name):
            raise WeightUpdateError(f"tensor {name!r} lies among adapters; publish whole weights or adapters, not both")
        if layer + ADAPTER_A not in by_name or layer + ADAPTER_B not in by_name:
            raise WeightUpdateError(f"tensor {name!r}: the other half of its adapter is missing; publish A and B")
        if target not in live:
            raise WeightUpdateError(f"adapter {layer!r}: the model has no {target!r}; is it the same architecture?")
        a, b = by_name[layer + ADAPTER_A], by_name[layer + ADAPTER_B]
        shape = tuple(live[target].shape)
        if len(a.shape) != 2 or len(b.shape) != 2 or (b.shape[0], a.shape[1]) != shape or a.shape[0] != b.shape[1]:
            raise WeightUpdateError(f"adapter {layer!r}: A {a.shape} and B {b.shape} do not make a change of {shape}")
        pairs[target] = (a, b)
    return pairs
