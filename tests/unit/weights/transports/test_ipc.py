"""Handles of GPU memory as JSON, and the writer with stand-ins for CUDA's handles."""

from __future__ import annotations

import json

import pytest
import torch

from areal_like.api.weights import TransportKind
from areal_like.errors import WeightUpdateError
from areal_like.weights.device_digest import device_digest
from areal_like.weights.manifest import check_manifest
from areal_like.weights.transports import ipc
from areal_like.weights.transports.ipc import BucketHandle, IpcReader, IpcWriter, SharedBuckets

ARGUMENTS = (
    torch.Tensor, torch.Size([300]), (1,), 64, torch.storage.TypedStorage, torch.uint8, 3, bytes(range(66)), 4096, 512,
    False, b"/torch_1_2_3", 7, bytes([255, 0, 128]), True,
)  # fmt: skip


def handle() -> BucketHandle:
    return BucketHandle.of_arguments(ARGUMENTS, 300)


def test_a_handle_comes_back_from_json_as_it_was() -> None:
    back = BucketHandle.from_json(json.loads(json.dumps(handle().to_json())))
    assert back == handle()
    assert back.arguments() == ARGUMENTS


def test_another_torchs_arguments_are_refused() -> None:
    with pytest.raises(WeightUpdateError, match="by 14 values"):
        BucketHandle.of_arguments(ARGUMENTS[:-1], 300)


def test_a_location_comes_back() -> None:
    shared = SharedBuckets(gpu="GPU-1", host="h", bucket_bytes=4096, buckets=(handle(), handle()))
    assert SharedBuckets.parse(shared.location()) == shared


@pytest.mark.parametrize("location", ["", "/dev/shm/x", "[]", '{"gpu": 1}', '{"gpu":"g","host":"h","buckets":[{}]}'])
def test_what_is_no_location_is_refused(location: str) -> None:
    with pytest.raises(WeightUpdateError, match="no location of the ipc transport"):
        SharedBuckets.parse(location)


def test_memory_on_another_gpu_is_refused() -> None:
    shared = SharedBuckets(gpu="GPU-1", host="elsewhere", bucket_bytes=4096, buckets=())
    with pytest.raises(WeightUpdateError, match="both must share one GPU"):
        shared.check_gpu("GPU-1")


def test_a_bucket_is_shared_once_and_described_in_every_version() -> None:
    shared: list[int] = []

    def share(bucket: torch.Tensor) -> BucketHandle:
        shared.append(bucket.data_ptr())
        return BucketHandle.of_arguments(ARGUMENTS, bucket.numel())

    writer = IpcWriter(bucket_bytes=4096, device=torch.device("cpu"), share=share, name="GPU-1")
    tensors = {"a": torch.randn(1500), "b": torch.randn(200, 10)}
    manifests = [writer.write(version, 0, iter(tensors.items())) for version in range(3)]
    assert len(shared) == 2
    for manifest in manifests:
        check_manifest(manifest)
        assert manifest.transport is TransportKind.IPC
        assert [entry.digest for entry in manifest.tensors] == [device_digest(tensor) for tensor in tensors.values()]
        assert [found.nbytes for found in SharedBuckets.parse(manifest.location).buckets] == [6000, 8000]
    assert len({manifest.location for manifest in manifests}) == 1


EMPTY = {
    "alone": [torch.empty(0, 4)],
    "at the end": [torch.arange(1500.0), torch.empty(0, 4)],
    "behind a full bucket": [torch.arange(1025.0), torch.empty(0)],
    "first": [torch.empty(3, 0), torch.arange(7.0)],
    "between full buckets": [torch.arange(1025.0), torch.empty(0), torch.arange(1025.0)],
}


@pytest.mark.parametrize("tensors", EMPTY.values(), ids=EMPTY)
def test_tensors_without_elements_arrive(tensors: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA shares no memory without bytes: such a bucket has no handle, and nobody opens one."""
    shared: dict[bytes, torch.Tensor] = {}

    def share(bucket: torch.Tensor) -> BucketHandle:
        assert bucket.numel()
        shared[str(len(shared)).encode()] = bucket
        arguments = list(ARGUMENTS)
        arguments[7] = str(len(shared) - 1).encode()
        return BucketHandle.of_arguments(arguments, bucket.numel())

    monkeypatch.setattr("torch.multiprocessing.reductions.rebuild_cuda_tensor", lambda *told: shared[told[7]])
    monkeypatch.setattr(ipc, "gpu_name", lambda device: "GPU-1")
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: type("S", (), {"synchronize": lambda self: None})())
    writer = IpcWriter(bucket_bytes=4096, device=torch.device("cpu"), share=share, name="GPU-1")
    for version in range(2):
        manifest = writer.write(version, 0, ((f"t{n}", tensor + version) for n, tensor in enumerate(tensors)))
        with IpcReader(manifest, torch.device("cpu")) as reader:
            for entry, tensor in zip(manifest.tensors, tensors, strict=True):
                target = torch.empty(entry.shape)
                reader.read_into(entry, target)
                assert torch.equal(target, tensor + version)
