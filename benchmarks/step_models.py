"""Llamas of given sizes with random weights, made where they will be used."""

from __future__ import annotations

import torch
from step_shapes import Shape
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from areal_like.train.attention import register_varlen_attention


def random_model(shape: Shape, *, device: str, dtype: torch.dtype, attention: str) -> nn.Module:
    register_varlen_attention()
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    assert isinstance(model, nn.Module)
    return model
