"""The policy as the trainer sees it: log-probs and entropy of written tokens, under the distribution sampled from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from areal_like.algo.balance import CostModel
from areal_like.algo.logprobs import StopBan, chunked_logprobs
from areal_like.algo.packing import Layout
from areal_like.api.generation import GenerationHyperparameters
from areal_like.config.lora import LoraConfig
from areal_like.errors import ConfigError
from areal_like.train.attention import ATTENTION_NAME, has_kernel, register_varlen_attention
from areal_like.train.batching import MicroBatch, queued_copy
from areal_like.train.layers import compile_layers
from areal_like.train.lora import add_adapters

#: config entries by which some models change the head's logits; we compute log-probs from plain logits
_LOGIT_CHANGES = ("final_logit_softcapping", "logits_scaling", "logit_scale")

#: the longest row is rounded up to a multiple of this
_LENGTH_STEP = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The logits processors that are replayed: those that change the distribution, and that training allows.

    Attributes:
        temperature: above 0.
        min_new_tokens: how many tokens of every answer are written with the stop tokens banned.
        stop_token_ids: the banned ids, ascending.
    """

    temperature: float = 1.0
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()


def load_language_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    layout: Layout = "padded",
    gradient_checkpointing: bool = False,
    compiled: bool = False,
    lora: LoraConfig | None = None,
) -> nn.Module:
    """A Hugging Face model from a folder, ready to be trained: no dropout, no cache.

    Raises:
        ConfigError: the folder holds no causal language model, or one whose head changes its logits.
    """
    register_varlen_attention()
    name = ATTENTION_NAME if layout == "packed" else attention
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=name, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path} holds no causal language model that loads: {error}") from error
    changed = [key for key in _LOGIT_CHANGES if getattr(model.config, key, None) not in (None, 1.0)]
    if changed:
        raise ConfigError(f"model.path: {path} sets {changed[0]} in its config; its log-probs would be wrong here")
    assert isinstance(model, nn.Module)
    if lora is not None:
        add_adapters(model, lora)
    prepare_for_training(model, gradient_checkpointing=gradient_checkpointing, compiled=compiled)
    return model


def prepare_for_training(model: nn.Module, *, gradient_checkpointing: bool = False, compiled: bool = False) -> None:
    """Training mode without dropout; layers recomputed and compiled as asked for. In place."""
    model.train()
    switch_off_dropout(model)
    if gradient_checkpointing:
        switch_on: Any = model.gradient_checkpointing_enable
        switch_on(gradient_checkpointing_kwargs={"use_reentrant": False})
    if compiled:
        compile_layers(model)


def switch_off_dropout(model: nn.Module) -> None:
    """The policy is what the servers run, and they drop nothing: else theta and prox would differ by chance."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def replayed_sampling(gconfig: GenerationHyperparameters, language_model: nn.Module) -> Sampling:
    """What of ``gconfig`` changes the distribution; stop tokens as the inference server finds them."""
    ids = set(gconfig.stop_token_ids)
    if not gconfig.ignore_eos:
        ids |= _eos_ids(language_model)
    return Sampling(
        temperature=gconfig.temperature,
        min_new_tokens=gconfig.min_new_tokens if ids else 0,
        stop_token_ids=tuple(sorted(ids)),
    )


def _eos_ids(language_model: nn.Module) -> set[int]:
    """The generation config's, else the model config's: the rule that servers follow."""
    for config in (getattr(language_model, "generation_config", None), language_model.config):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return {found} if isinstance(found, int) else set(found)
    return set()


def counted_cost(language_model: nn.Module) -> CostModel:
    """Operations of a row's forward pass: two a parameter and token, and causal attention, which grows with its square.

    Counted rather than timed, so that every rank and every repetition of a run plans alike.
    """
    config: Any = language_model.config
    products = sum(parameter.numel() for parameter in language_model.parameters())
    if not getattr(config, "tie_word_embeddings", False):
        embedding: Any = language_model.get_input_embeddings()  # type: ignore[operator]
        products -= embedding.weight.numel()
    layers, hidden = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0)
    return CostModel(per_token=2.0 * products, per_token_pair=2.0 * layers * hidden)


class PolicyModel(nn.Module):
    """A language model whose forward pass answers what the objective asks, and nothing of size tokens × vocabulary.

    The whole computation, the head included, lies inside ``forward``, so that FSDP has gathered the head when it runs.
    """

    def __init__(self, language_model: nn.Module, sampling: Sampling) -> None:
        super().__init__()
        self.language_model = language_model
        self.sampling = sampling

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of every written token, float32 [T] (float64 for a float64 model)."""
        model: Any = self.language_model
        head = model.get_output_embeddings()
        found = chunked_logprobs(
            self._hidden(batch),
            head.weight,
            batch.target_T,
            bias_V=head.bias,
            temperature=self.sampling.temperature,
            ban=self._stop_ban(batch),
        )
        return found.logprob_T, found.entropy_T

    def _hidden(self, batch: MicroBatch) -> Tensor:
        """The last hidden state [T, D] at the position that predicts each written token."""
        model: Any = self.language_model
        extra = self._packed_arguments(batch) if batch.row_starts is not None else {}
        # padding is on the right and attention is causal: no written token ever sees it, so no mask is needed
        states: Tensor = model.base_model(input_ids=batch.input_ids, use_cache=False, **extra).last_hidden_state
        return states.flatten(0, 1).index_select(0, batch.select_T)

    def _packed_arguments(self, batch: MicroBatch) -> dict[str, Any]:
        """What attention over packed rows reads. Host numbers become part of compiled code, so they are kept few."""
        dtype = next(self.language_model.parameters()).dtype  # of the embeddings, gathered: the one computed in
        arguments: dict[str, Any] = {"position_ids": batch.position_ids, "cu_seq_lens_q": batch.row_starts}
        if has_kernel(batch.input_ids.device.type, dtype):
            longest = -(-max(batch.row_lengths) // _LENGTH_STEP) * _LENGTH_STEP  # the kernel wants an upper bound
            return arguments | {"max_length_q": longest}
        return arguments | {"row_lengths": batch.row_lengths}

    def _stop_ban(self, batch: MicroBatch) -> StopBan | None:
        if batch.stop_ban_T is None or not self.sampling.stop_token_ids:
            return None
        ids = queued_copy(torch.tensor(self.sampling.stop_token_ids), batch.stop_ban_T.device)
        return StopBan(ids_K=ids, active_T=batch.stop_ban_T)
