"""Loading a model, and refusing one that the loop's masks do not describe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from areal_like.errors import ConfigError
from areal_like.inference.embedded.model import (
    ModelRunner,
    cache_token_bytes,
    context_length,
    eos_ids,
    load_decoder,
    load_model,
)
from areal_like.inference.spec import InferenceServerSpec

SMALL = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def test_a_missing_folder_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: no folder"):
        load_model(InferenceServerSpec(name="s", model_path=str(tmp_path / "none")))


def test_a_folder_without_a_model_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no causal language model"):
        load_model(InferenceServerSpec(name="s", model_path=str(tmp_path)))


def test_a_device_that_is_not_there_is_a_config_error(saved: Path) -> None:
    with pytest.raises(ConfigError, match="inference device 'cuda:99' cannot hold"):
        load_model(InferenceServerSpec(name="s", model_path=str(saved), device="cuda:99"))


def test_a_folder_without_a_tokenizer_has_no_decoder(tmp_path: Path, saved: Path) -> None:
    assert load_decoder(str(tmp_path)) is None
    decoder = load_decoder(str(saved))
    assert decoder is not None
    assert decoder.decode([3, 4], skip_special_tokens=False, clean_up_tokenization_spaces=False) == "w3w4"


def test_loads_the_asked_dtype_and_keeps_ties(saved: Path) -> None:
    loaded = load_model(InferenceServerSpec(name="s", model_path=str(saved), dtype="bfloat16"))
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert ModelRunner(loaded, device=torch.device("cpu")).vocabulary == 48


def test_context_length_is_the_models_or_less(model: Any) -> None:
    assert context_length(model, None) == 64
    assert context_length(model, 10) == 10
    with pytest.raises(ConfigError, match="made for 64 tokens; got 65"):
        context_length(model, 65)


def test_a_sliding_window_is_served_only_up_to_its_width() -> None:
    sliding = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=32))
    assert context_length(sliding, 32) == 32
    with pytest.raises(ConfigError, match=r"set rollout\.context_length=32"):
        context_length(sliding, None)
    unused = Qwen2ForCausalLM(Qwen2Config(**SMALL, sliding_window=32, use_sliding_window=False))
    assert context_length(unused, None) == 64


def test_eos_ids_are_the_generation_configs_first(model: Any) -> None:
    assert eos_ids(model) == {1}
    model.generation_config.eos_token_id = [2, 3]
    assert eos_ids(model) == {2, 3}
    model.generation_config.eos_token_id = None
    assert eos_ids(model) == {1}


def test_cache_bytes_of_a_token(model: Any) -> None:
    # 2 (keys, values) x 2 layers x 2 heads x 4 dimensions x 4 bytes
    assert cache_token_bytes(model) == 128
    assert LlamaConfig(**SMALL).num_key_value_heads == 2


@pytest.mark.parametrize("make_config", [MistralConfig, Qwen2Config])
def test_other_families_through_the_same_loop(
    make_config: Any, make: Any, make_loop: Any, run: Any, logprobs: Any
) -> None:
    torch.manual_seed(0)
    kinds = {MistralConfig: MistralForCausalLM, Qwen2Config: Qwen2ForCausalLM}
    served = kinds[make_config](make_config(**SMALL, sliding_window=None, initializer_range=0.4)).eval()
    requests = [make([3, 4, 5], seed=1, max_new_tokens=10), make([6], seed=2, max_new_tokens=10)]
    run(make_loop(served), *requests)
    for request in requests:
        expected = logprobs(served, list(request.prompt), request.answers[0].tokens)
        assert request.answers[0].logprobs == pytest.approx(expected, abs=1e-5)


def test_bf16_stays_close_to_float32(model: Any, make: Any, make_loop: Any, run: Any, logprobs: Any) -> None:
    import copy

    low = copy.deepcopy(model).bfloat16()
    request = make([3, 4, 5], seed=1, max_new_tokens=20)
    run(make_loop(low), request)
    expected = logprobs(low, [3, 4, 5], request.answers[0].tokens)
    difference = torch.tensor(request.answers[0].logprobs) - torch.tensor(expected)
    assert difference.abs().mean() < 0.1
