"""Tensors of a GPU, exported through host memory: the same bytes as from the CPU."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from areal_like.api.weights import Manifest
from areal_like.weights.digest import parse_dtype, tensor_digest
from areal_like.weights.host_copies import HostCopies
from areal_like.weights.transports.base import WeightWriter, make_reader
from areal_like.weights.transports.disk import DiskWriter
from areal_like.weights.transports.shm import ShmWriter

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
GPU = torch.device("cuda", 0)
Named = list[tuple[str, torch.Tensor]]


@pytest.fixture(scope="module")
def model() -> Named:
    """On the CPU: several dtypes, a tie, a scalar, nothing, strides, and a tensor of several blocks."""
    generator = torch.Generator().manual_seed(3)
    large = torch.randn(9_000_001, generator=generator)
    tensors: Named = [("large", large), ("strided", torch.randn(300, 70, generator=generator).t())]
    tensors += [(f"w{n}", torch.randn(n * 1000 + 1, generator=generator).to(torch.bfloat16)) for n in range(60)]
    tensors += [("scale", torch.tensor(0.5)), ("nothing", torch.empty(0, 4)), ("ids", torch.arange(1001))]
    return [*tensors, ("tied", large)]


@pytest.fixture(params=[1, 4])
def copies(request: pytest.FixtureRequest) -> Iterator[HostCopies]:
    made = HostCopies(threads=request.param, budget=2**22, block_bytes=2**20)
    yield made
    made.close()


@pytest.fixture(params=["shm", "disk"])
def writer(request: pytest.FixtureRequest, copies: HostCopies, tmp_path: Path) -> Iterator[WeightWriter]:
    made: WeightWriter
    if request.param == "shm":
        made = ShmWriter(f"test-{uuid.uuid4().hex[:12]}", bucket_bytes=2**20, copies=copies)
    else:
        made = DiskWriter(tmp_path / "weights", bucket_bytes=2**20, copies=copies)
    yield made
    made.close()


def through_one_buffer(model: Named) -> Iterator[tuple[str, torch.Tensor]]:
    """An exporter whose only memory on the GPU is overwritten as soon as the next tensor is asked for."""
    buffer = torch.empty(max(tensor.nbytes for _, tensor in model), dtype=torch.uint8, device=GPU)
    for name, tensor in model:
        if not tensor.numel():
            yield name, tensor.to(GPU)
            continue
        own = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        yield name, own.copy_(tensor)
        buffer.fill_(0xEE)


def check(manifest: Manifest, model: Named) -> None:
    assert [(entry.name, entry.digest) for entry in manifest.tensors] == [(n, tensor_digest(t)) for n, t in model]
    with make_reader(manifest) as reader:
        for entry in manifest.tensors:
            target = torch.empty(entry.shape, dtype=parse_dtype(entry.dtype))
            reader.read_into(entry, target)
            assert tensor_digest(target) == entry.digest, entry.name


def test_a_model_on_a_gpu_is_exported_like_the_same_model_on_the_cpu(writer: WeightWriter, model: Named) -> None:
    on_gpu = [(name, tensor.to(GPU)) for name, tensor in model]
    found = writer.write(1, 0, on_gpu)
    check(found, model)
    assert writer.write(2, 0, model).tensors == found.tensors


def test_an_exporter_may_overwrite_its_gpu_memory(writer: WeightWriter, model: Named) -> None:
    for version in range(3):
        check(writer.write(version, 0, through_one_buffer(model)), model)


def test_copies_follow_the_stream_that_made_the_tensor(writer: WeightWriter) -> None:
    def export() -> Iterator[tuple[str, torch.Tensor]]:
        tensor = torch.zeros(2**20, device=GPU)
        for number in range(8):
            torch.cuda._sleep(20_000_000)  # the kernel after it is still to come when the tensor is handed over
            tensor.add_(1.0)
            yield str(number), tensor

    with torch.cuda.stream(torch.cuda.Stream(GPU)):
        manifest = writer.write(1, 0, export())
    check(manifest, [(str(number), torch.full((2**20,), number + 1.0)) for number in range(8)])


def test_memory_is_page_locked_and_used_again(copies: HostCopies, tmp_path: Path, model: Named) -> None:
    writer = DiskWriter(tmp_path / "weights", bucket_bytes=2**20, copies=copies)
    writer.write(1, 0, [(name, tensor.to(GPU)) for name, tensor in model])
    assert copies._blocks._free
    assert all(block.memory.is_pinned() for block in copies._blocks._free)
    assert copies.statistics().bytes_kept <= 2**22
    writer.close()
    assert copies.statistics().bytes_kept == 0
