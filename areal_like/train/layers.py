"""The decoder layers of a language model: what is sharded, compiled and recomputed one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """Members of the longest module list."""
    lists = [list(m) for m in module.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=len, default=[])


def compile_layers(module: nn.Module) -> None:
    """Run every decoder layer through torch.compile, in place; parameter names stay as they are.

    The layers are alike, so one compilation serves all; numbers of tokens and rows are symbolic, so it serves every
    micro-batch. Only ``forward`` is compiled: hooks (sharding) and recomputation (checkpointing) stay outside of it.
    """
    for layer in decoder_layers(module):
        layer.forward = _with_any_size(torch.compile(layer.forward))


def _with_any_size(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Tell the compiler which sizes vary, before it has seen two of them and compiles a second time."""

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        for tensor in _tensors((args, tuple(kwargs.values()))):
            # the last dimension of floats is features; that of ids, positions and row starts is tokens or rows
            dims = tensor.ndim - 1 if tensor.is_floating_point() else tensor.ndim
            for dim in range(dims):
                if tensor.shape[dim] > 1:
                    torch._dynamo.maybe_mark_dynamic(tensor, dim)
        return forward(*args, **kwargs)

    return call


def _tensors(value: Any) -> list[Tensor]:
    """Tensors in nested tuples."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, tuple) else []
