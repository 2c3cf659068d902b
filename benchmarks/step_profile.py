"""Where the time of one update goes: kernels by kind, the host's busiest operations, and the device's idle time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from step_shapes import Shape, flops

#: kernels by what they do, first match wins
_KINDS = (
    ("attention", ("flash", "fmha", "attention")),
    ("logits", ("_softmax_forward", "_softmax_backward")),
    ("products", ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitk")),
    ("optimiser", ("adam", "multi_tensor", "foreach")),
    ("copies", ("nccl", "split_with_sizes", "chunk_cat", "catarray", "memcpy", "memset")),
    ("layers' elementwise", ("triton",)),
)
_KERNELS, _HOST = 25, 15


def profiled(update: Callable[[], Any], device: str) -> dict[str, Any]:
    """Milliseconds of one ``update``, which has run before."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    idle(device)
    started = time.perf_counter()
    update()
    idle(device)
    plain = time.perf_counter() - started
    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        started = time.perf_counter()
        update()
        idle(device)
        wall = time.perf_counter() - started
    kernels: dict[str, list[float]] = {}
    host: dict[str, list[float]] = {}
    for event in found.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            _add(host, event.name, event.self_cpu_time_total)
        elif not getattr(event, "is_user_annotation", False):
            _add(kernels, event.name, event.self_device_time_total)
    kinds: dict[str, float] = {}
    for name, (milliseconds, _) in kernels.items():
        kind = next((k for k, words in _KINDS if any(w in name.lower() for w in words)), "other")
        kinds[kind] = kinds.get(kind, 0.0) + milliseconds
    busy = sum(kinds.values())
    return {
        "wall_ms": wall * 1e3,
        "wall_without_profiler_ms": plain * 1e3,
        "busy_ms": busy,
        "idle_without_profiler_ms": plain * 1e3 - busy,
        "kinds_ms": dict(sorted(kinds.items(), key=lambda pair: -pair[1])),
        "kernels": _largest(kernels, _KERNELS),
        "host": _largest(host, _HOST),
    }


def needed(shape: Shape, lengths: list[int], written: list[int]) -> dict[str, float]:
    """Operations of forward and backward, of products and of attention."""
    attention = 3.0 * 2 * shape.layers * shape.hidden * sum(length * length for length in lengths)
    return {"attention": attention, "products": flops(shape, lengths, written, passes=3.0) - attention}


def idle(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def _add(sums: dict[str, list[float]], name: str, microseconds: float) -> None:
    total = sums.setdefault(name, [0.0, 0.0])
    total[0] += microseconds / 1e3
    total[1] += 1


def _largest(sums: dict[str, list[float]], count: int) -> list[dict[str, Any]]:
    largest = sorted(sums.items(), key=lambda pair: -pair[1][0])[:count]
    return [{"name": name[:120], "ms": ms, "calls": int(calls)} for name, (ms, calls) in largest]
