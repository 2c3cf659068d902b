"""Our weight-transfer engine in a vLLM worker: staged in the background, loaded while the scheduler is paused.

``start`` touches nothing; ``update`` checks the manifest and begins to fetch; ``status`` tells how that goes on;
``finish`` loads: layer-wise reload, as vLLM's engines do, then the tied head, whose packed copy a CPU keeps as it was.

What comes from GPU to GPU is received by vLLM's own engines (``native``) in ``finish``, straight into the loader. Once
it is known where that puts each tensor, a GPU's worker copies straight into the live parameters (``reloading``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
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

from areal_like.api.weights import Manifest, TensorEntry
from areal_like.inference.vllm_plugin import native
from areal_like.inference.vllm_plugin.delivery import Delivery, Source, open_delivery
from areal_like.inference.vllm_plugin.device_memory import CudaMemory
from areal_like.inference.vllm_plugin.host_staging import HostStaging
from areal_like.inference.vllm_plugin.loading import COMPARED_BYTES, check_arrived, load_copy
from areal_like.inference.vllm_plugin.parts import Parts
from areal_like.inference.vllm_plugin.receiver import Receiver, Staged
from areal_like.inference.vllm_plugin.recorder import Recorder, comparable
from areal_like.inference.vllm_plugin.reloading import InPlace, put_back, reloaded
from areal_like.inference.vllm_plugin.worker import asleep
from areal_like.weights.checkpoint import HEAD, Expected
from areal_like.weights.device_digest import DeviceDigests
from areal_like.weights.nccl import NcclGroups
from areal_like.weights.parallel import host_threads
from areal_like.weights.transports.ipc import SharedBuckets
from areal_like.weights.transports.seat import Membership

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
        self._in_place: InPlace | None = None
        self._memory: CudaMemory | None = None
        if self.device.type == "cuda":
            self._in_place = InPlace(self.model, self.vllm_config)
            self._memory = CudaMemory(self.device)
            host = HostStaging(self._memory, threads=host_threads(), held_back=self._held_back())
            self._receiver = Receiver(self.device, self._deliver, host)
        else:
            self._receiver = Receiver(self.device)
        self._membership: Membership | None = None
        self._server = ""
        self._digests: DeviceDigests | None = None
        self._expected: Expected | None = None
        self._loaded: Manifest | None = None
        self._loaded_seconds = 0.0
        self._damaged = False
        self._comparable: frozenset[str] | None = None
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
        if self._memory is not None:
            self._memory.lent = self.vllm_config.model_config.enable_sleep_mode and bool(asleep())
        self._receiver.stage(manifest, self._expect(), newest=self._newest())
        self._prepare(manifest)

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
            self._load(staged)
        self._damaged = False
        self._loaded, self._loaded_seconds = staged.manifest, staged.seconds

    def shutdown(self) -> None:
        self._receiver.close()
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
        self._prepare(manifest)
        return open_delivery(manifest, self._member, self.device)

    def _prepare(self, manifest: Manifest) -> None:
        """Find out, once and before any pause, where the loader puts each tensor of ``manifest``: it fits the model."""
        if self._in_place is not None:
            self._in_place.prepare(self._travelling(manifest))

    def _load(self, staged: Staged) -> None:
        """What came through host memory."""
        self._damaged = True
        manifest, held_back, parts, in_place = staged.manifest, self._held_back(), self._parts, self._in_place
        placement = in_place.loader(self._travelling(manifest)) if in_place is not None else None
        way = reloaded(self.model, self.model_config, tied=self._tied(), parts=parts)
        try:
            load_copy(
                self.model, staged.copy, held_back=held_back, reloading=way, wait=self._wait, parts=parts,
                placement=placement,
            )  # fmt: skip
            if in_place is not None:
                in_place.prove_by(manifest, held_back, staged.copy)
            parts.end("check")
        except BaseException:
            self._wait()  # what was staged is given back, and must not be read any more
            put_back(self.model)
            raise
        finally:
            staged.copy.release()
            parts.end("release")

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

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
            self._comparable = comparable(self.model, COMPARED_BYTES)
        in_place = self._in_place.loader(self._travelling(manifest))
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
        check_arrived(self.model, recorder.copies, recorder.loaded, held_back)
        self._in_place.prove(manifest, held_back, self._digests)
        parts.end("check")

    def _tied(self) -> bool:
        return bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))

    def _held_back(self) -> frozenset[str]:
        return frozenset({HEAD}) if self._tied() else frozenset()

    def _travelling(self, manifest: Manifest) -> list[TensorEntry]:
        """What the loader is given."""
        held = self._held_back()
        return [entry for entry in manifest.tensors if entry.name not in held]

    def _newest(self) -> tuple[int, int]:
        return (self._loaded.incarnation, self._loaded.version) if self._loaded else (-1, -1)

    def _expect(self) -> Expected:
        if self._expected is None:
            self._expected = Expected.of(Path(self.model_config.model), tied=self._tied())
        return self._expected
