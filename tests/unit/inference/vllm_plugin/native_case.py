"""Run by ``test_native.py`` in an engine's environment: vLLM's own consumers behind our recorder, on the CPU.

What a CPU lacks (streams, handles of GPU memory) is replaced; groups are threads. The consumers' code is vLLM's.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing.reductions as reductions

from areal_like.api.weights import Manifest
from areal_like.errors import WeightUpdateError
from areal_like.inference.vllm_plugin import native
from areal_like.inference.vllm_plugin.delivery import Source
from areal_like.inference.vllm_plugin.recorder import Recorder
from areal_like.weights.device_digest import DeviceDigests
from areal_like.weights.transports import nccl
from areal_like.weights.transports.ipc import BucketHandle, IpcWriter, SharedBuckets
from areal_like.weights.transports.nccl import NcclWriter
from areal_like.weights.transports.seat import Membership, Seat
from tests.fakes.groups import FakeGroups, FakeNet

CPU = torch.device("cpu")
GENERATOR = torch.Generator().manual_seed(0)
WEIGHTS = {f"t{n}": torch.randn(37 * (n % 5) + 2, 11, generator=GENERATOR).to(torch.bfloat16) for n in range(40)}
WEIGHTS |= {"full": torch.randn(4096, generator=GENERATOR), "none": torch.empty(0, 4), "few": torch.ones(2, 3)}
WEIGHTS |= {"full again": torch.ones(2000), "nothing at the end": torch.empty(0, 7)}
#: as our engine, for what vLLM's are constructed with
OURS = SimpleNamespace(config=None, vllm_config=SimpleNamespace(parallel_config=None, model_config=None), device=CPU)


class NoStream:
    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Model:
    def __init__(self) -> None:
        self.got: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        self.got |= {name: tensor.clone() for name, tensor in weights}
        return set(self.got)


def without_a_gpu() -> None:
    torch.cuda.Stream = NoStream  # type: ignore[assignment, misc]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment, return-value]
    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.get_device_properties = lambda index: SimpleNamespace(uuid="GPU-1")  # type: ignore[assignment]


def received(source: Source, manifest: Manifest) -> dict[str, torch.Tensor]:
    model = Model()
    recorder = Recorder(model, DeviceDigests(CPU), kept=frozenset(), held_back=frozenset({"t3"}))
    native.feed(source, recorder, manifest, OURS)
    recorder.verify(manifest)
    return model.got


def check(got: dict[str, torch.Tensor]) -> None:
    assert got.keys() == WEIGHTS.keys() - {"t3"}
    assert all(torch.equal(got[name], WEIGHTS[name]) for name in got)


def over_a_group() -> None:
    net = FakeNet()
    groups = FakeGroups(net, "gpu-0")
    writer = NcclWriter(host="127.0.0.1", bucket_bytes=4096, groups=groups, device=CPU, stall=20.0)
    membership = Membership(FakeGroups(net, "gpu-1"), CPU)
    for version in range(2):
        manifest = writer.write(version, 0, iter(WEIGHTS.items()))
        seat = Seat(manifest, membership)
        seat.prepare()
        found: list[dict[str, torch.Tensor]] = []
        seat.receive(lambda group, manifest=manifest, found=found: found.append(received(group, manifest)))
        check(found[0])
    writer.close()


def over_handles() -> None:
    shared: dict[bytes, torch.Tensor] = {}

    def share(bucket: torch.Tensor) -> BucketHandle:
        name = str(len(shared)).encode()
        shared[name] = bucket
        return BucketHandle(
            nbytes=bucket.numel(), tensor_offset=0, device=0, handle=name, storage_bytes=bucket.numel(),
            storage_offset=0, counter=b"c", counter_offset=0, event=b"e", event_needed=False,
        )  # fmt: skip

    reductions.rebuild_cuda_tensor = lambda *told: shared[told[7]]
    ipc_engine: Any = sys.modules.get("vllm.distributed.weight_transfer.ipc_engine")
    if ipc_engine is not None:
        ipc_engine.rebuild_cuda_tensor = reductions.rebuild_cuda_tensor
    writer = IpcWriter(bucket_bytes=4096, device=CPU, share=share, name="GPU-1")
    OURS.device = torch.device("cpu", 0)
    manifest = writer.write(1, 0, iter(WEIGHTS.items()))
    check(received(SharedBuckets.parse(manifest.location), manifest))
    next(iter(shared.values()))[7] += 1
    try:
        received(SharedBuckets.parse(manifest.location), manifest)
    except WeightUpdateError as error:
        assert "damaged or overwritten" in str(error)
    else:
        raise AssertionError("a byte that changed was not noticed")


if __name__ == "__main__":
    without_a_gpu()
    native.load_engines()
    nccl.WARM_UP_BYTES = (16,)  # type: ignore[assignment]
    over_a_group()
    over_handles()
    sys.stdout.write("whole\n")
