"""LoRA through PEFT: adapters in place of full training, and what of the model is published and saved then.

LoRA (Hu et al. 2021): W + (alpha / r) · B A with W frozen, A [r, in] random and B [out, r] zero at first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from areal_like.config.lora import LoraConfig
from areal_like.errors import ConfigError
from areal_like.weights.adapters import ADAPTER_A, ADAPTER_B, add_adapter

#: PEFT's name of the adapter, a part of its parameters' names
_ADAPTER = "default"

Whole = Callable[[Tensor], Tensor]


def add_adapters(model: nn.Module, lora: LoraConfig) -> None:
    """Put adapters into ``model`` in place, and freeze everything else. Draws A from torch's random state.

    Raises:
        ConfigError: PEFT is not installed, or a name is not that of linear layers below the head.
    """
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ConfigError("actor.lora: needs PEFT; install it with pip install 'areal-like[lora]'") from error
    settings = PeftConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, bias="none", target_modules=list(lora.target_modules)
    )
    _check_targets(model, lora.target_modules)
    inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)


def _check_targets(model: nn.Module, targets: Sequence[str]) -> None:
    """PEFT is content if one of the names is found, and puts adapters where nothing here reads them.

    Log-probs are taken from the head's own weight, and B · A is added to weights that are [out, in].
    """
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    for target in targets:
        found = {n: m for n, m in model.named_modules() if n == target or n.endswith(f".{target}")}
        if found.keys() <= linear.keys() and found:
            continue
        kinds = ", ".join(sorted({type(m).__name__ for m in found.values()}))
        got = f"is {'the head' if head in found.values() else kinds}" if found else "is not in the model"
        names = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        raise ConfigError(
            f"actor.lora.target_modules: {target} {got}; name linear layers below the head: {names or 'it has none'}"
        )


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Layers with an adapter by the name that they have without one; empty where the model has none."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def adapter_weights(model: nn.Module, whole: Whole) -> Iterator[tuple[str, Tensor]]:
    """``<layer>.lora_A`` and ``<layer>.lora_B`` of every adapter, B already scaled: what a server adds is B · A."""
    for name, layer in adapted_layers(model).items():
        a, b = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
        yield name + ADAPTER_A, whole(a.detach())
        yield name + ADAPTER_B, whole(b.detach()) * layer.scaling[_ADAPTER]


def merged_weights(model: nn.Module, whole: Whole) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model by its name without adapters, each adapter added to its layer's weight.

    The sum is taken in float32 at least and then rounded, as servers do it.
    """
    layers = adapted_layers(model)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        layer = layers.get(name.removesuffix(".base_layer.weight"))
        tensor = whole(parameter.detach())
        if layer is not None:
            a, b = whole(layer.lora_A[_ADAPTER].weight.detach()), whole(layer.lora_B[_ADAPTER].weight.detach())
            tensor = add_adapter(tensor, a, b * layer.scaling[_ADAPTER])
        yield name.replace(".base_layer.", "."), tensor
