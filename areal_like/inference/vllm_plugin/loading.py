"""From a staged copy into the model, while the scheduler is paused, and how it is known to be there. Free of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from areal_like.errors import WeightUpdateError
from areal_like.inference.vllm_plugin.parts import Parts
from areal_like.inference.vllm_plugin.placement import Placement
from areal_like.inference.vllm_plugin.recorder import first_difference
from areal_like.inference.vllm_plugin.staged_copy import StagedCopy

#: parameters up to this size are read back after loading: norms and biases, some in every layer
COMPARED_BYTES = 2**20


def load_copy(
    model: Any,
    copy: StagedCopy,
    *,
    held_back: frozenset[str],
    reloading: AbstractContextManager[None],
    wait: Callable[[], None],
    parts: Parts,
    placement: Placement | None = None,
) -> None:
    """Load ``copy`` into ``model`` (a torch module with vLLM's ``load_weights``).

    Args:
        held_back: tensors that the model must not be given: a head that is the embedding.
        reloading: around the model's own loading (``reloading.reloaded``).
        wait: for the device. Nothing reads ``copy`` any more afterwards.
        placement: loads in place instead, where that is possible.

    Raises:
        WeightUpdateError: a tensor did not arrive.
    """
    with torch.no_grad():
        if placement is not None:
            loaded = _fill(placement, copy, held_back)
            parts.end("load")
        else:
            with reloading:
                loaded = model.load_weights(copy.plain(held_back))
                parts.end("load")
        wait()
        parts.end("device")
        small = {
            name: tensor
            for name, tensor in copy.tensors.items()
            if tensor.nbytes <= COMPARED_BYTES and name not in held_back and not copy.parts(name)
        }
        check_arrived(model, small, loaded, held_back)


def check_arrived(
    model: torch.nn.Module, sent: Mapping[str, torch.Tensor], loaded: set[str] | None, held_back: frozenset[str]
) -> None:
    """Every parameter was named by the loader; those of ``sent`` that keep their checkpoint's form are compared.

    Raises:
        WeightUpdateError: one was not, or differs.
    """
    parameters = dict(model.named_parameters())
    if loaded is not None:
        missed = sorted(parameters.keys() - loaded - held_back)
        if missed:
            raise WeightUpdateError(f"parameters {missed[:4]} were not loaded although every tensor came")
    odd = first_difference(parameters, sent)
    if odd:
        raise WeightUpdateError(f"tensor {odd!r} was loaded, and the model's parameter differs from it")


def _fill(placement: Placement, copy: StagedCopy, held_back: frozenset[str]) -> set[str] | None:
    """What lies on the device first, and then what has to come over the bus; nothing is waited for."""
    there: dict[str, torch.Tensor] = {}
    here: dict[str, torch.Tensor] = {}
    for name, tensor in copy.tensors.items():
        if name not in held_back and not copy.parts(name):
            (there if name in copy.on_device else here)[name] = tensor
    loaded = placement.load_weights(there.items())
    placement.load_weights(here.items())
    for name, tensor in copy.tensors.items():
        if name not in held_back and copy.parts(name):
            placement.load_parts(name, tensor, copy.parts(name))
    return loaded
