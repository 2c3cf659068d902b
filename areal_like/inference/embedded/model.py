"""The model behind the decode loop: loaded once, called through its public forward and cache interface only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_like.errors import ConfigError
from areal_like.inference.embedded.kv_cache import CapturedPrompt, SlotCache
from areal_like.inference.embedded.stops import Decoder
from areal_like.inference.spec import InferenceServerSpec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: cache layouts whose attention is the causal one that the loop's masks describe
_PLAIN_ATTENTION = {"full_attention", "sliding_attention", "attention"}


class ModelRunner:
    """Prefill and decode forwards of one model.

    Masks are additive floats [rows, 1, queries, keys]: sdpa then needs no conversion per layer and eager takes nothing
    else.
    """

    def __init__(self, model: Any, *, device: torch.device) -> None:
        self.model = model.eval()
        self.device = device
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.vocabulary = int(model.get_input_embeddings().num_embeddings)
        self._lowest = torch.finfo(self.dtype).min

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, CapturedPrompt]:
        """Forward J prompts together, left-padded; logits [J, vocabulary] after each, and their keys and values."""
        captured = CapturedPrompt([len(p) for p in prompts])
        width = captured.columns
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=self.device)
        mask = positions = None
        if min(captured.lengths) < width:
            mask, positions = self._padded(captured.lengths, width)
        out = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions if positions is not None else torch.arange(width, device=self.device)[None],
            past_key_values=captured,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1], captured

    def decode(self, tokens: Tensor, positions: Tensor, longest: int, cache: SlotCache) -> Tensor:
        """Forward one token per row at its own position, all below ``longest``; logits [R, vocabulary]."""
        width = cache.aim(positions, longest)
        hidden = torch.arange(width, device=self.device) > positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, self._lowest)
        out = self.model(
            input_ids=tokens[:, None],
            attention_mask=mask[:, None, None],
            position_ids=positions[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        logits: Tensor = out.logits[:, -1]
        return logits

    def _padded(self, lengths: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
        """Mask and positions of left-padded prompts. Padding attends to itself, so no row of the softmax is empty."""
        columns = torch.arange(width, device=self.device)
        padding = width - torch.tensor(lengths, device=self.device)
        seen = (columns >= padding[:, None])[:, None, :] & (columns[:, None] >= columns)
        seen |= torch.eye(width, dtype=torch.bool, device=self.device)
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen, self._lowest)
        return mask[:, None], (columns - padding[:, None]).clamp_(min=0)


def load_model(spec: InferenceServerSpec) -> Any:
    """The model of ``spec`` in its dtype, on its device.

    Raises:
        ConfigError: there is no loadable model, or its attention is not one the loop can serve.
    """
    if not Path(spec.model_path).is_dir():
        raise ConfigError(f"model.path: no folder at {spec.model_path!r}; give a folder with a Hugging Face model")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            spec.model_path, dtype=_DTYPES[spec.dtype], attn_implementation=spec.attn_implementation
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {spec.model_path!r} holds no causal language model: {error}") from error
    try:
        return model.to(spec.device).eval()
    except (RuntimeError, AssertionError) as error:  # torch raises either where the device does not exist
        raise ConfigError(f"inference device {spec.device!r} cannot hold the model: {error}") from error


def load_decoder(model_path: str) -> Decoder | None:
    """The folder's tokenizer, needed for stop strings only; None if it has none."""
    if not any((Path(model_path) / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    tokenizer: Decoder = AutoTokenizer.from_pretrained(model_path)
    return tokenizer


def eos_ids(model: Any) -> frozenset[int]:
    """Ids that end an answer by default: the generation config's, else the model config's."""
    for config in (model.generation_config, model.config):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, list | tuple) else (found,))
    return frozenset()


def context_length(model: Any, asked: int | None) -> int:
    """Longest sequence to serve: what was asked for, else what the model was made for.

    Raises:
        ConfigError: longer than the model allows, or its layers attend in a way that the loop's masks do not describe.
    """
    config = model.config.get_text_config()
    made_for = getattr(config, "max_position_embeddings", None)
    if asked is None and made_for is None:
        raise ConfigError("rollout.context_length: the model's config names no limit, so one must be given")
    if asked is not None and made_for is not None and asked > made_for:
        raise ConfigError(f"rollout.context_length: the model was made for {made_for} tokens; got {asked}")
    length = int(asked if asked is not None else made_for or 0)
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - _PLAIN_ATTENTION:
        raise ConfigError(
            f"model.path: the embedded engine serves causal attention; {config.model_type} has layers of type "
            f"{sorted(kinds - _PLAIN_ATTENTION)}; use rollout.backend vllm or sglang"
        )
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in kinds or (not kinds and getattr(config, "use_sliding_window", True))
    if window is not None and slides and length > window:
        raise ConfigError(
            f"rollout.context_length: the model attends to {window} tokens in some layers, and the embedded engine "
            f"serves it up to there only; got {length}; set rollout.context_length={window} or less"
        )
    return length


def cache_token_bytes(model: Any) -> int:
    """Bytes of keys and values of one token in all layers, an upper bound for models that share or compress them."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * head_dim * next(model.parameters()).element_size())


def default_cache_bytes(device: torch.device) -> int:
    """Half of the device's free memory; a quarter on a CPU, which the trainer shares."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free // 2
    import psutil

    return int(psutil.virtual_memory().available // 4)
