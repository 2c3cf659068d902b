"""Attention over rows that lie end to end: each row sees only itself, and nothing of size N² is ever held.

Registered with transformers under :data:`ATTENTION_NAME`; models with causal full attention can use it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION_NAME = "areal_like_varlen"
#: dtypes for which CUDA has a kernel over rows of any length
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def register_varlen_attention() -> None:
    """Make :func:`varlen_attention` known to transformers. Repeating it changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, varlen_attention)


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within rows.

    Args:
        query: [1, heads, N, D]; key and value: [1, key-value heads, N, D], N tokens of all rows.
        kwargs: ``cu_seq_lens_q`` int32 [rows + 1], where rows start and the last ends; ``max_length_q`` int;
            ``row_lengths`` tuple of int.

    Returns:
        [1, N, heads, D], and no weights.

    Raises:
        ValueError: the model needs more than causal full attention.
    """
    for name in ("sliding_window", "softcap", "position_bias", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f"packed rows: attention with {name} is not computed here; set mb_spec.packing: padded")
    if attention_mask is not None:
        raise ValueError("packed rows: an attention mask is not read here; rows are told apart by cu_seq_lens_q")
    if has_kernel(query.device.type, query.dtype):
        return _by_kernel(query, key, value, scaling, kwargs["cu_seq_lens_q"], kwargs["max_length_q"]), None
    return _row_by_row(query, key, value, scaling, kwargs["row_lengths"]), None


def has_kernel(device_type: str, dtype: torch.dtype) -> bool:
    """Whether one kernel takes all rows; else every row is a call, and needs its length on the host."""
    return device_type == "cuda" and dtype in _KERNEL_DTYPES and _kernel() is not None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # lengths differ from call to call: a compiled version would be made for each
def _row_by_row(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, row_lengths: Sequence[int]) -> Tensor:
    grouped = key.shape[1] != query.shape[1]
    parts = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        for q, k, v in zip(*(torch.split(x, list(row_lengths), dim=2) for x in (query, key, value)), strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2)


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, row_starts: Tensor, longest: int
) -> Tensor:
    kernel = _kernel()
    assert kernel is not None
    q, k, v = (x.squeeze(0).transpose(0, 1).contiguous() for x in (query, key, value))
    out = kernel(q, k, v, row_starts, row_starts, longest, longest, scale=scaling, window_size=(-1, 0))
    return out.unsqueeze(0)


@cache
def _kernel() -> Callable[..., Tensor] | None:
    """torch's kernel for rows of any length; it takes grouped heads as they are, from 2.13 on if told so."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    named = inspect.signature(varlen_attn).parameters
    if "window_size" not in named or "scale" not in named:
        return None
    told = "enable_gqa" in named

    def kernel(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if told:
            kwargs["enable_gqa"] = q.shape[1] != k.shape[1]
        out = varlen_attn(q, k, v, *args, **kwargs)
        assert isinstance(out, Tensor)  # asked for no auxiliary outputs
        return out

    return kernel
