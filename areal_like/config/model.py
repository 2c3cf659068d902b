"""``model``: the policy that is trained and served."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from areal_like.config.section import Section


class ModelConfig(Section):
    path: str = Field(description="folder with a Hugging Face model and tokenizer")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of the forward pass")
    attn_implementation: Literal["eager", "sdpa"] = Field("sdpa", description="attention kernel")
