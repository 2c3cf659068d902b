"""Our weight-transfer engine in a vLLM worker: staged in the background, loaded while the scheduler is paused.

``start`` touches nothing; ``update`` checks the manifest and begins to fetch; ``status`` tells how that goes on;
``finish`` loads: layer-wise reload, as vLLM's engines do, then the tied head, whose packed copy a CPU keeps as it was.

What comes from GPU to GPU is received by vLLM's own engines (``native``) in ``finish``, straight into the loader, or,
once it is known where that puts each tensor, straight into the live parameters (``reloading``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
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
from areal_like.inference.vllm_plugin import native
from areal_like.inference.vllm_plugin.delivery import Delivery, Source, open_delivery
from areal_like.inference.vllm_plugin.parts import Parts
from areal_like.inference.vllm_plugin.receiver import Receiver, Staged
from areal_like.inference.vllm_plugin.recorder import Recorder, comparable, first_difference
from areal_like.inference.vllm_plugin.reloading import InPlace, put_back, reloaded
from areal_like.weights.checkpoint import HEAD, Expected
from areal_like.weights.device_digest import DeviceDigests
from areal_like.weights.nccl import NcclGroups
from areal_like.weights.transports.ipc import SharedBuckets
from areal_like.weights.transports.seat import Membership

#: parameters up to this size are read back after loading: norms and biases, some in every layer
_COMPARED_BYTES = 2**20
#: seconds until all members of a group between GPUs have joined it
_JOIN_TIMEOUT = 60.0
#: seconds for a group whose device has nothing left to do
_SETTLED = 1.0


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing: each manifest says where its bytes are."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """``manifest``: as JSON; ``server``: our server's name in the run."""

    manifest: str
    server: str = ""


class StagedTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One per worker. All methods run on the worker's thread, between two steps of the model."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: WeightTransferConfig, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        on_gpu = self.device.type == "cuda"
        self._receiver = Receiver(self.device, self._deliver if on_gpu else None)
        self._membership: Membership | None = None
        self._server = ""
        self._digests: DeviceDigests | None = None
        self._expected: Expected | None = None
        self._loaded: Manifest | None = None
        self._loaded_seconds = 0.0
        self._damaged = False
        self._comparable: frozenset[str] | None = None
        self._in_place: InPlace | None = None
        self._parts = Parts()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing is kept between two versions."""

    def start_weight_update(self) -> None:
        """The live weights stay as they are until ``finish``."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Begin to fetch; :meth:`status` tells how it goes on.

        Raises:
            WeightUpdateError: the manifest does not fit the model.
            StaleCommand: the manifest is older than what is loaded.
        """
        manifest = Manifest.model_validate_json(update_info.manifest)
        self._server = update_info.server
        self._receiver.stage(manifest, self._expect(), newest=self._newest())

    def finish_weight_update(self) -> None:
        """Load what is staged. From the first layer on, a failure leaves the model damaged until the next whole load.

        Raises:
            WeightUpdateError: nothing is staged (nothing was touched), or a tensor did not arrive in the model.
        """
        staged = self._receiver.take()
        self._parts = Parts()
        if staged.delivery is not None:
            self._receive(staged.manifest, staged.delivery)
        else:
            self._damaged = True
            try:
                _load(self.model, self.model_config, staged, self._parts)
            except BaseException:
                put_back(self.model)
                raise
        self._damaged = False
        self._loaded, self._loaded_seconds = staged.manifest, staged.seconds

    def shutdown(self) -> None:
        self._receiver.discard()
        if self._membership is not None:
            self._membership.leave()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """vLLM 0.26 wants a sender from every engine; ours is ``areal_like.weights.transports``.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("weights are sent by areal_like.weights.transports, in the trainer's process")

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
            "parts": self._parts.seconds,
            "pid": os.getpid(),
        }

    def _deliver(self, manifest: Manifest) -> Delivery:
        """How a version comes from GPU to GPU; what it will be verified with is made ready."""
        if self._digests is None:
            self._digests = DeviceDigests(self.device)
            native.load_engines()
        self._digests.reserve(max(entry.nbytes for entry in manifest.tensors))
        if self._in_place is None:
            self._in_place = InPlace(self.model, self.vllm_config)
        held_back = self._held_back()
        self._in_place.prepare([entry for entry in manifest.tensors if entry.name not in held_back])
        return open_delivery(manifest, self._member, self.device)

    def _member(self) -> Membership:
        if self._membership is None:
            groups = NcclGroups(self.device, timeout=_JOIN_TIMEOUT, opening=native.unpinned)
            self._membership = Membership(groups, self.device, workers=self.parallel_config.world_size)
        self._membership.server = self._server or self._membership.id
        return self._membership

    def _receive(self, manifest: Manifest, delivery: Delivery) -> None:
        """Load what comes, and verify that it is what was published. Until bytes come, nothing is touched."""
        touched = False

        def take(source: Source) -> None:
            nonlocal touched
            if touched:  # by a group that broke
                torch.cuda.synchronize()
                put_back(self.model)
            touched = self._damaged = True
            self._parts.end("await")
            self._take(manifest, source)

        try:
            delivery.receive(take)
            self._parts.end("leave")
        except BaseException:
            if touched:
                torch.cuda.synchronize()
                put_back(self.model)
            raise

    def _take(self, manifest: Manifest, source: Source) -> None:
        assert self._digests is not None and self._in_place is not None
        held_back, parts = self._held_back(), self._parts
        if self._comparable is None:
            self._comparable = comparable(self.model, _COMPARED_BYTES)
        in_place = self._in_place.loader([entry for entry in manifest.tensors if entry.name not in held_back])
        loader = self.model if in_place is None else in_place
        way = reloaded(self.model, self.model_config, tied=self._tied(), parts=parts)
        recorder = Recorder(loader, self._digests, kept=self._comparable, held_back=held_back)
        try:
            with torch.no_grad(), way if in_place is None else nullcontext():
                native.feed(source, recorder, manifest, self)
                parts.end("load")  # handed to the device, which may still be at it
                native.settle()
                if not isinstance(source, SharedBuckets):
                    source.wait(_SETTLED)
                parts.end("device")
                recorder.verify(manifest)
                parts.end("verify")
        finally:
            recorder.drop()
        _check_arrived(self.model, recorder.copies, recorder.loaded, tied=self._tied())
        self._in_place.prove(manifest, held_back, self._digests)
        parts.end("check")

    def _tied(self) -> bool:
        return bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))

    def _held_back(self) -> frozenset[str]:
        """Tensors that the loader must not see: a head that is the embedding."""
        return frozenset({HEAD}) if self._tied() else frozenset()

    def _newest(self) -> tuple[int, int]:
        return (self._loaded.incarnation, self._loaded.version) if self._loaded else (-1, -1)

    def _expect(self) -> Expected:
        if self._expected is None:
            self._expected = Expected.of(Path(self.model_config.model), tied=self._tied())
        return self._expected


def _load(model: Any, model_config: Any, staged: Staged, parts: Parts) -> None:
    """Reload ``model`` (a torch module with vLLM's ``load_weights``).

    Raises:
        WeightUpdateError: a tensor did not arrive.
    """
    tied = bool(getattr(model_config.hf_config, "tie_word_embeddings", False))
    travelling = {name: tensor for name, tensor in staged.tensors.items() if not (tied and name == HEAD)}
    with torch.no_grad(), reloaded(model, model_config, tied=tied, parts=parts):
        loaded = model.load_weights(iter(travelling.items()))
        parts.end("load")
    small = {name: tensor for name, tensor in travelling.items() if tensor.nbytes <= _COMPARED_BYTES}
    _check_arrived(model, small, loaded, tied=tied)
    parts.end("check")


def _check_arrived(
    model: torch.nn.Module, sent: Mapping[str, torch.Tensor], loaded: set[str] | None, *, tied: bool
) -> None:
    """Every parameter was named by the loader; those of ``sent`` that keep their checkpoint's form are compared."""
    parameters = dict(model.named_parameters())
    if loaded is not None:
        missed = sorted(parameters.keys() - loaded - ({HEAD} if tied else set()))
        if missed:
            raise WeightUpdateError(f"parameters {missed[:4]} were not loaded although every tensor came")
    odd = first_difference(parameters, sent)
    if odd:
        raise WeightUpdateError(f"tensor {odd!r} was loaded, and the model's parameter differs from it")
