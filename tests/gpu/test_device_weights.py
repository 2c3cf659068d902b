"""Weights from GPU to GPU, between real processes: packed copies, digests, CUDA IPC, NCCL and its losses."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from areal_like.api.weights import Manifest
from areal_like.errors import WeightUpdateError
from areal_like.weights.device_digest import CHUNK_BYTES, DeviceDigests, device_digest, tried_kernel
from areal_like.weights.device_packer import DevicePacker
from areal_like.weights.nccl import Communicator, GroupBroken, NcclGroups
from areal_like.weights.transports.ipc import IpcWriter
from areal_like.weights.transports.nccl import NcclWriter
from tests.gpu.device_processes import BUCKET_BYTES, STALL, weights

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
GPU = torch.device("cuda", 0)
PROGRAM = "tests.gpu.device_processes"


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", PROGRAM, *arguments]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as started:
        try:
            yield started
        finally:
            started.kill()


def heard(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    line = started.stdout.readline().strip()
    assert line, "the other process ended"
    return line


def tell(started: subprocess.Popen[str], manifest: Manifest) -> None:
    assert started.stdin is not None
    started.stdin.write(manifest.model_dump_json() + "\n")
    started.stdin.flush()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (1021,), (4096, 1024), (333, 77)])
def test_digests_are_those_of_the_cpu(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape, device=GPU) * 100).to(dtype)
    assert device_digest(tensor) == device_digest(tensor.cpu())


def test_the_fused_digest_is_used_and_reads_the_bytes_once() -> None:
    """A plain pass writes and reads ten times the bytes: below three is one read, whatever else was at work."""
    kernel = tried_kernel(GPU)
    assert kernel is not None
    tensor = torch.randint(-(2**62), 2**62, (2**26,), device=GPU)
    seconds = {}
    for name, digests in (("fused", DeviceDigests(GPU)), ("plain", DeviceDigests(GPU, plain=True))):
        digests.reserve(tensor.nbytes)
        found = []
        for _ in range(3):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            digests.add(tensor)
            found.append(digests.read()[0])
            seconds[name] = time.perf_counter() - begun
        assert set(found) == {device_digest(tensor)}
    assert seconds["fused"] < seconds["plain"] / 3


def test_many_tensors_are_digested_in_one_launch_and_in_any_stream() -> None:
    tensors = [tensor for _, tensor in weights(1, GPU)]
    digests = DeviceDigests(GPU)
    digests.reserve(max(tensor.nbytes for tensor in tensors))
    torch.cuda.synchronize()
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            digests.add(*tensors)
    torch.cuda.synchronize()
    assert digests.read() == 2 * tuple(device_digest(tensor.cpu()) for tensor in tensors)


def test_a_large_tensor_is_digested_in_parts_and_with_little_memory() -> None:
    tensor = torch.randint(-(2**62), 2**62, (CHUNK_BYTES // 8 * 3 + 5,), device=GPU)
    digests = DeviceDigests(GPU)
    digests.reserve(tensor.nbytes)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    digests.add(tensor)
    found = digests.read()[0]
    assert torch.cuda.max_memory_allocated() - before <= 256 * 2**20
    assert found == device_digest(tensor.cpu())
    tensor[-3] += 1
    assert device_digest(tensor) != found


def test_the_packed_copy_is_whole_and_stays_where_it_is() -> None:
    packer = DevicePacker(GPU, BUCKET_BYTES)
    first = packer.pack(weights(1, GPU))
    places = [bucket.data_ptr() for bucket in first.buckets]
    allocated = torch.cuda.memory_allocated()
    second = packer.pack(weights(2, GPU))
    assert [bucket.data_ptr() for bucket in second.buckets] == places
    assert torch.cuda.memory_allocated() == allocated
    sources = dict(weights(2, GPU))
    for chunk, bucket in zip(second.chunks, second.buckets, strict=True):
        for entry, offset in zip(second.entries[chunk.first : chunk.last], chunk.offsets, strict=True):
            part = bucket[offset : offset + entry.nbytes].view(torch.bfloat16).view(entry.shape)
            assert torch.equal(part, sources[entry.name])
            assert entry.digest == device_digest(sources[entry.name])


def test_a_copy_that_does_not_fit_is_told_in_numbers_and_leaves_nothing_behind() -> None:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(GPU)
    before = torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction((before + 600 * 2**20) / total, GPU)
    try:
        packer = DevicePacker(GPU, 64 * 2**20)
        tensor = torch.zeros(16 * 2**20, device=GPU)
        with pytest.raises(WeightUpdateError, match=r"does not fit on cuda:0: .* MiB are free.*weights.transport=shm"):
            packer.pack((f"t{number}", tensor) for number in range(100))
        assert torch.cuda.memory_allocated() <= before + tensor.nbytes + 64 * 2**20
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, GPU)
    assert free


def test_versions_over_cuda_ipc() -> None:
    writer = IpcWriter(bucket_bytes=BUCKET_BYTES, device=GPU)
    with process("shared", "3") as reader:
        assert heard(reader) == "ready"
        for version in range(3):
            manifest = writer.write(version, 0, weights(version, GPU))
            tell(reader, manifest)
            assert heard(reader) == manifest.digest
    writer.close()


def test_a_group_of_one() -> None:
    groups = NcclGroups(GPU, timeout=60.0)
    group = groups.join(groups.unique_id(), rank=0, size=1)
    tensor = torch.arange(1000, device=GPU)
    for _ in range(3):
        group.broadcast(tensor, src=0)
    group.wait(STALL)
    assert torch.equal(tensor, torch.arange(1000, device=GPU))
    group.abort()
    assert group.broken
    group.abort()
    with pytest.raises(GroupBroken):
        group.broadcast(tensor, src=0)


def test_a_member_that_never_comes_is_not_waited_for() -> None:
    begun = time.monotonic()
    with pytest.raises(GroupBroken, match="a member is missing or hangs"):
        Communicator(NcclGroups(GPU, timeout=1.0).unique_id(), rank=0, size=2, device=GPU, timeout=1.0)
    assert time.monotonic() - begun < 20.0
    assert float(torch.ones(8, device=GPU).sum()) == 8.0


@pytest.fixture
def writer() -> Iterator[NcclWriter]:
    groups = NcclGroups(GPU, timeout=60.0)
    made = NcclWriter(host="127.0.0.1", bucket_bytes=BUCKET_BYTES, groups=groups, device=GPU, stall=STALL)
    yield made
    made.close()


@needs_two
def test_versions_over_nccl_in_one_group(writer: NcclWriter) -> None:
    with process("receive", "3") as server:
        assert heard(server) == "ready"
        names = set()
        for version in range(3):
            manifest = writer.write(version, 0, weights(version, GPU))
            tell(server, manifest)
            assert heard(server) == "seated"
            name, _, digest = heard(server).partition(" ")
            assert digest == manifest.digest
            names.add(name)
    assert len(names) == 1


@needs_two
@pytest.mark.parametrize("after", [0, 2])
def test_a_server_that_is_killed_in_mid_broadcast_leaves_a_trainer_that_goes_on(writer: NcclWriter, after: int) -> None:
    manifest = writer.write(1, 0, weights(1, GPU))
    begun = time.monotonic()
    with process("receive-and-die", str(after)) as lost:
        assert heard(lost) == "ready"
        tell(lost, manifest)
        assert heard(lost) == "seated"
        assert lost.wait(60) == -9
    with process("receive", "2") as server:
        assert heard(server) == "ready"
        tell(server, manifest)
        assert heard(server) == "seated"
        assert heard(server).endswith(manifest.digest)
        assert time.monotonic() - begun < 90
        following = writer.write(2, 0, weights(2, GPU))
        tell(server, following)
        assert heard(server) == "seated"
        assert heard(server).endswith(following.digest)
    assert float(torch.ones(8, device=GPU).sum()) == 8.0


@needs_two
def test_a_trainer_that_is_killed_in_mid_broadcast_is_noticed_in_time() -> None:
    with process("train-and-die") as trainer, process("endure") as server:
        assert server.stdin is not None
        server.stdin.write(heard(trainer) + "\n")
        server.stdin.flush()
        word, seconds, _ = heard(server).split()
        assert word == "told"
        assert float(seconds) < 10 * STALL
        assert heard(server) == "alive"
