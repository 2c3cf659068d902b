"""The two ways into a vLLM model: its layer-wise reload, as vLLM's own engines load, and copies in place.

Private names of vLLM are used here; the versions are pinned in ``requirements/vllm*.txt``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from areal_like.api.weights import Manifest, TensorEntry
from areal_like.inference.vllm_plugin.parts import Parts
from areal_like.inference.vllm_plugin.placement import NotPlaceable, Placement, trace
from areal_like.inference.vllm_plugin.staged_copy import StagedCopy
from areal_like.weights.device_digest import DeviceDigests

_LOG = logging.getLogger(__name__)


@contextmanager
def reloaded(model: Any, model_config: Any, *, tied: bool, parts: Parts) -> Iterator[None]:
    """Around ``model.load_weights``: vLLM's layer-wise reload, and heads that follow their embedding."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(model)
    parts.end("begin")
    yield
    finalize_layerwise_reload(model, model_config)
    for head in _tied_heads(model, tied=tied):
        head.quant_method.process_weights_after_loading(head)
    parts.end("finalize")


def put_back(model: torch.nn.Module) -> None:
    """End a reload that failed half-way: vLLM would take the next one for its continuation."""
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()


class InPlace:
    """Whether and how a version can be copied straight into the live parameters; found out once for a model.

    A server's first version comes by the layer-wise reload, and shows whether the placement that was traced is true.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        self._model, self._config = model, vllm_config
        self._placement: Placement | None = None
        self._traced = False
        self._proved = False

    def prepare(self, entries: Sequence[TensorEntry]) -> None:
        """Trace the loader, the first time: a while of Python, before any pause."""
        if self._traced:
            return
        self._traced = True
        try:
            _check_copies_alone(self._model, self._config)
            self._placement = trace(self._model, entries)
        except NotPlaceable as reason:
            _LOG.info("weights are loaded layer by layer: %s", reason)

    def loader(self, entries: Sequence[TensorEntry]) -> Placement | None:
        """What loads tensors like these in place; None where they must be loaded layer by layer."""
        return self._placement if self._proved and self._placement and self._placement.fits(entries) else None

    def prove(self, manifest: Manifest, held_back: frozenset[str], digests: DeviceDigests) -> None:
        """The model has just loaded ``manifest`` by itself: is it where the placement says? Waits for the device."""
        entries = [entry for entry in manifest.tensors if entry.name not in held_back]
        placement = self._unproved(entries)
        if placement is not None:
            found = placement.digests(digests)
            self._judge(next((entry.name for entry in entries if found[entry.name] != entry.digest), ""))

    def prove_by(self, manifest: Manifest, held_back: frozenset[str], copy: StagedCopy) -> None:
        """As :meth:`prove`, with the tensors themselves: those that the model has just loaded, verified before."""
        placement = self._unproved([entry for entry in manifest.tensors if entry.name not in held_back])
        if placement is None:
            return
        try:
            with torch.no_grad():
                self._judge(placement.first_difference(copy.plain(held_back)))
        except torch.OutOfMemoryError:
            _LOG.warning("no room on the device to see whether weights can be copied in place; the next version tells")

    def _unproved(self, entries: Sequence[TensorEntry]) -> Placement | None:
        placement = self._placement
        return None if self._proved or placement is None or not placement.fits(entries) else placement

    def _judge(self, wrong: str) -> None:
        """``wrong``: a tensor that is not where the placement says; empty if there is none."""
        if wrong:
            self._placement = None
            _LOG.warning("weights are loaded layer by layer: %r does not lie where its loader seems to put it", wrong)
            return
        self._proved = True
        _LOG.info("from here on, weights are copied in place")


def _check_copies_alone(model: torch.nn.Module, vllm_config: Any) -> None:
    """Nothing is made of parameters after they were loaded.

    Raises:
        NotPlaceable: something is, or nobody knows.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        raise NotPlaceable(f"{current_platform.device_name} may pack weights")
    if vllm_config.model_config.quantization is not None or vllm_config.lora_config is not None:
        raise NotPlaceable("the model is quantised or has adapters")
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cuda":
            raise NotPlaceable(f"parameter {name!r} lies on {parameter.device}")
    check_modules(model)


def check_modules(model: torch.nn.Module) -> None:
    """The part of it that looks at vLLM's layers.

    Raises:
        NotPlaceable: one has a way of its own with its weights.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            raise NotPlaceable(f"{name!r} has a {type(method).__name__}")
        if type(module) is Attention:
            if not _does_nothing(module.impl):
                raise NotPlaceable(f"{name!r} is computed by {type(module.impl).__name__}, which makes its own weights")
        elif hasattr(module, "process_weights_after_loading"):
            raise NotPlaceable(f"{name!r} is a {type(module).__name__}, which may make weights of its own")


def _does_nothing(impl: object) -> bool:
    """An attention kernel's method that is called after loading is the empty one that it inherits."""
    from vllm.v1.attention import backend

    method = getattr(type(impl), "process_weights_after_loading", None)
    return method is None or method.__module__ == backend.__name__


def _tied_heads(model: torch.nn.Module, *, tied: bool) -> Iterator[Any]:
    """Heads whose weight is the embedding's: a CPU keeps a packed copy of it that reloading does not renew."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    if tied:
        yield from (module for module in model.modules() if isinstance(module, ParallelLMHead))
