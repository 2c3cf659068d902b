"""Run by ``test_placement.py`` in an engine's environment: vLLM's own models, built on a CPU, and their loaders.

A CPU's parameters are packed after loading; here nothing is processed, and they are what a CUDA device would hold.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from areal_like.api.weights import TensorEntry
from areal_like.inference.vllm_plugin.placement import NotPlaceable, Placement, trace
from areal_like.inference.vllm_plugin.reloading import check_modules
from areal_like.weights.device_digest import DeviceDigests, device_digest

COMMON = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 301, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "rope_theta": 10000.0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1,
           "norm_topk_prob": True, "mlp_only_layers": []}  # fmt: skip
#: by name: vLLM's class, the model's type, whether the head is the embedding
DENSE = {
    "llama": ("LlamaForCausalLM", "llama", True),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", False),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", True),
}


def built(folder: Path, architecture: str, kind: str, tied: bool, **more: Any) -> tuple[Any, Any]:
    folder.mkdir()
    told = {"architectures": [architecture], "model_type": kind, "tie_word_embeddings": tied, **COMMON, **more}
    (folder / "config.json").write_text(json.dumps(told))
    config = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, enforce_eager=True, load_format="dummy", max_model_len=64
    ).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        with set_default_torch_dtype(torch.bfloat16):
            return initialize_model(vllm_config=config), config


def checkpoint(tied: bool, kind: str, seed: int) -> dict[str, torch.Tensor]:
    """As Hugging Face names and shapes them."""
    width, heads, groups, head, inner = 64, 4, 2, 16, 96
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (301, width), "model.norm.weight": (width,)}
    for layer in range(2):
        at = f"model.layers.{layer}."
        for name, rows in (("q", heads), ("k", groups), ("v", groups)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows * head, width)
            if kind == "qwen2":
                shapes[f"{at}self_attn.{name}_proj.bias"] = (rows * head,)
        if kind == "qwen3":
            shapes |= {f"{at}self_attn.{name}_norm.weight": (head,) for name in "qk"}
        shapes[f"{at}self_attn.o_proj.weight"] = (width, heads * head)
        shapes |= {f"{at}mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (width, inner)
        shapes |= {f"{at}{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    if not tied:
        shapes["lm_head.weight"] = (301, width)
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def entries(weights: dict[str, torch.Tensor]) -> list[TensorEntry]:
    return [
        TensorEntry(name=name, dtype="bfloat16", shape=tuple(t.shape), nbytes=t.nbytes, digest=device_digest(t))
        for name, t in weights.items()
    ]


def held(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def check_dense(folder: Path, name: str) -> None:
    """What the placement loads is, parameter by parameter, what vLLM's loader loads."""
    architecture, kind, tied = DENSE[name]
    model, _ = built(folder / name, architecture, kind, tied)
    check_modules(model)
    first, second = (checkpoint(tied, kind, seed) for seed in (1, 2))
    model.load_weights(iter(second.items()))
    theirs = held(model)
    model.load_weights(iter(first.items()))
    before = held(model)
    placement = trace(model, entries(first))
    assert all(torch.equal(tensor, before[key]) for key, tensor in held(model).items()), "tracing wrote something"
    found = placement.digests(DeviceDigests("cpu"))
    assert found == {entry.name: entry.digest for entry in entries(first)}, "it is not where the placement says"
    assert placement.first_difference(first.items()) == ""
    assert placement.first_difference(second.items()) == next(iter(second)), "another version passes for this one"
    names = model.load_weights(iter(first.items()))
    halves = [dict(list(second.items())[:7]), dict(list(second.items())[7:])]
    told = [placement.load_weights(half.items()) for half in halves]
    assert told == [names, names], "the loader tells other names"
    ours = held(model)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs), "loaded otherwise than vLLM does"
    assert isinstance(placement, Placement)


def check_experts(folder: Path) -> None:
    """Kernels of experts may lay weights out anew: such a model is left to vLLM."""
    model, _ = built(folder / "experts", "Qwen3MoeForCausalLM", "qwen3_moe", False, **EXPERTS)
    try:
        check_modules(model)
    except NotPlaceable as reason:
        assert "MoE" in str(reason), reason
    else:
        raise AssertionError("experts were taken for plain layers")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        if sys.argv[1] == "experts":
            check_experts(Path(name))
        else:
            check_dense(Path(name), sys.argv[1])
    sys.stdout.write("whole\n")
