"""Our weight-transfer engine in a vLLM worker: staged in the background, loaded while the scheduler is paused.

``start`` touches nothing; ``update {stage}`` checks the manifest and begins to fetch; ``update {wait}`` tells how that
ended; ``finish`` loads: layer-wise reload as vLLM's own engines do, then the tied head, whose packed copy vLLM
forgets on a CPU. It uses private names of vLLM; the version is pinned in ``requirements/vllm.txt``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from areal_like.api.weights import Manifest
from areal_like.errors import WeightUpdateError
from areal_like.inference.vllm_plugin.receiver import Receiver, Staged
from areal_like.weights.checkpoint import HEAD, Expected

#: parameters up to this size are read back after loading: norms and biases, some in every layer
_COMPARED_BYTES = 2**20


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing: each manifest says where its bytes are."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """``op``: ``stage`` (with a manifest as JSON) or ``wait``."""

    op: str
    manifest: str = ""


class StagedTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One per worker. All methods run on the worker's thread, between two steps of the model."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: WeightTransferConfig, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        self._receiver = Receiver(self.device)
        self._expected: Expected | None = None
        self._loaded: Manifest | None = None
        self._loaded_seconds = 0.0
        self._damaged = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing is kept between two versions."""

    def start_weight_update(self) -> None:
        """The live weights stay as they are until ``finish``."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Begin to fetch, or tell how fetching ended.

        Raises:
            WeightUpdateError: the manifest does not fit the model, or what was fetched is damaged.
            StaleCommand: the manifest is older than what is loaded.
            ValueError: an unknown ``op``.
        """
        if update_info.op == "stage":
            manifest = Manifest.model_validate_json(update_info.manifest)
            self._receiver.stage(manifest, self._expect(), newest=self._newest())
        elif update_info.op == "wait":
            if self._receiver.state != "staged":
                raise WeightUpdateError(self._receiver.error or f"nothing is staged: {self._receiver.state}")
        else:
            raise ValueError(f"update op {update_info.op!r}: known are 'stage' and 'wait'")

    def finish_weight_update(self) -> None:
        """Load what is staged. From the first layer on, a failure leaves the model damaged until the next whole load.

        Raises:
            WeightUpdateError: nothing is staged (nothing was touched), or a tensor did not arrive in the model.
        """
        staged = self._receiver.take()
        self._damaged = True
        try:
            _load(self.model, self.model_config, staged)
        except BaseException:
            _put_back(self.model)
            raise
        self._damaged = False
        self._loaded, self._loaded_seconds = staged.manifest, staged.seconds

    def shutdown(self) -> None:
        self._receiver.discard()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """vLLM 0.26 wants a sender from every engine; ours is ``areal_like.weights.transports``.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("weights are sent by areal_like.weights.transports, in the trainer's process")

    def discard(self) -> None:
        """Give up what is staged."""
        self._receiver.discard()

    def status(self) -> dict[str, Any]:
        """``WorkerStatus`` of the control's side. The digest is that of the verified bytes that were loaded last."""
        state, pending, loaded = self._receiver.state, self._receiver.manifest, self._loaded
        staged = self._receiver.staged
        described = staged.manifest if staged else loaded
        if state == "idle" and loaded is not None:
            state = "applied"
        return {
            "state": state,
            "error": self._receiver.error,
            "incarnation": loaded.incarnation if loaded else -1,
            "version": loaded.version if loaded else -1,
            "digest": loaded.digest if loaded else "",
            "staged_incarnation": pending.incarnation if pending else -1,
            "staged_version": pending.version if pending else -1,
            "bytes": described.total_bytes if described else 0,
            "seconds": staged.seconds if staged else self._loaded_seconds,
            "damaged": self._damaged,
            "pid": os.getpid(),
        }

    def _newest(self) -> tuple[int, int]:
        return (self._loaded.incarnation, self._loaded.version) if self._loaded else (-1, -1)

    def _expect(self) -> Expected:
        if self._expected is None:
            tied = bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))
            self._expected = Expected.of(Path(self.model_config.model), tied=tied)
        return self._expected


def _load(model: Any, model_config: Any, staged: Staged) -> None:
    """Reload ``model`` (a torch module with vLLM's ``load_weights``).

    Raises:
        WeightUpdateError: a tensor did not arrive.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    tied = bool(getattr(model_config.hf_config, "tie_word_embeddings", False))
    travelling = {name: tensor for name, tensor in staged.tensors.items() if not (tied and name == HEAD)}
    with torch.no_grad():
        initialize_layerwise_reload(model)
        loaded = model.load_weights(iter(travelling.items()))
        finalize_layerwise_reload(model, model_config)
        for head in _tied_heads(model, tied=tied):
            head.quant_method.process_weights_after_loading(head)
    _check_arrived(model, travelling, loaded, tied=tied)


def _tied_heads(model: torch.nn.Module, *, tied: bool) -> Iterator[Any]:
    """Heads whose weight is the embedding's: a CPU keeps a packed copy of it that reloading does not renew."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    if tied:
        yield from (module for module in model.modules() if isinstance(module, ParallelLMHead))


def _check_arrived(
    model: torch.nn.Module, staged: dict[str, torch.Tensor], loaded: set[str] | None, *, tied: bool
) -> None:
    """Every parameter was named by the loader; small ones that keep their checkpoint's form are compared."""
    parameters = dict(model.named_parameters())
    if loaded is not None:
        missed = sorted(parameters.keys() - loaded - ({HEAD} if tied else set()))
        if missed:
            raise WeightUpdateError(f"parameters {missed[:4]} were not loaded although every tensor came")
    for name, tensor in staged.items():
        live = parameters.get(name)
        if live is None or live.shape != tensor.shape or tensor.nbytes > _COMPARED_BYTES:
            continue  # fused, packed or padded; or it would cost the pause more than it tells
        if not torch.equal(live.detach().cpu(), tensor.to(live.dtype)):
            raise WeightUpdateError(f"tensor {name!r} was loaded, and the model's parameter differs from it")


def _put_back(model: torch.nn.Module) -> None:
    """End a reload that failed half-way: vLLM would take the next one for its continuation."""
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
