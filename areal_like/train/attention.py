"""Attention over rows that lie end to end: each row sees only itself, and nothing of size N² is ever held.

Registered with transformers under :data:`ATTENTION_NAME`; models with causal full attention can use it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

_varlen_attn: Callable[..., Tensor] | None
try:
    from torch.nn.attention.varlen import varlen_attn as _varlen_attn  # type: ignore[assignment]
except ImportError:  # before torch 2.10
    _varlen_attn = None

#: grouped heads are taken as they are; from 2.13 on the kernel wants to be told of them
_TOLD_OF_GROUPS = _varlen_attn is not None and "enable_gqa" in inspect.signature(_varlen_attn).parameters

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


#: the kernel wants a head size divisible by this
_HEAD_MULTIPLE = 8


def has_kernel(device_type: str, dtype: torch.dtype) -> bool:
    """Whether one kernel takes all rows; else every row is a call, and needs its length on the host."""
    return device_type == "cuda" and dtype in _KERNEL_DTYPES and _varlen_attn is not None


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
    q, k, v = (x.squeeze(0).transpose(0, 1).contiguous() for x in (query, key, value))
    grouped = {"enable_gqa": q.shape[1] != k.shape[1]} if _TOLD_OF_GROUPS else {}
    assert _varlen_attn is not None
    size = q.shape[-1]
    if spare := -size % _HEAD_MULTIPLE:  # zeros change no score and add columns of zeros, which are cut off again
        q, k, v = (F.pad(x, (0, spare)) for x in (q, k, v))
        scaling = size**-0.5 if scaling is None else scaling
    out = _varlen_attn(q, k, v, row_starts, row_starts, longest, longest, scale=scaling, window_size=(-1, 0), **grouped)
    return out[..., :size].unsqueeze(0)
