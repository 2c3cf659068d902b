"""Attention over rows that lie end to end: each row sees only itself, and nothing of size N² is ever held.

Registered with transformers under :data:`ATTENTION_NAME`; models with causal full attention can use it.
"""

from __future__ import annotations

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
    grouped = key.shape[1] != query.shape[1]
    if query.is_cuda and query.dtype in _KERNEL_DTYPES:
        return _by_kernel(query, key, value, scaling, grouped, kwargs), None
    parts = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        for q, k, v in zip(*(torch.split(x, kwargs["row_lengths"], dim=2) for x in (query, key, value)), strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, grouped: bool, kwargs: dict[str, Any]
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    starts, longest = kwargs["cu_seq_lens_q"], kwargs["max_length_q"]
    q, k, v = (x.squeeze(0).transpose(0, 1).contiguous() for x in (query, key, value))
    out = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scaling, window_size=(-1, 0), enable_gqa=grouped)
    assert isinstance(out, Tensor)  # asked for no auxiliary outputs
    return out.unsqueeze(0)
