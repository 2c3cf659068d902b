"""The way out through host memory: what the media hold is what a plain loop would have written, whoever writes it."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import struct
import tempfile
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from areal_like.api.weights import Manifest, TensorEntry
from areal_like.errors import WeightUpdateError
from areal_like.weights import host_blocks, host_copies
from areal_like.weights.host_copies import HostCopies, HostCopy, Job
from areal_like.weights.manifest import ITEM_BYTES
from areal_like.weights.segments import segment_path
from areal_like.weights.transports.disk import DiskWriter
from areal_like.weights.transports.shm import ShmWriter

Named = list[tuple[str, torch.Tensor]]
THREADS = pytest.mark.parametrize("threads", [1, 4])
PAGE = 4096


@contextmanager
def shm_writer(copies: HostCopies, bucket_bytes: int = 256) -> Iterator[ShmWriter]:
    writer = ShmWriter(f"test-{uuid.uuid4().hex[:12]}", bucket_bytes=bucket_bytes, copies=copies)
    try:
        yield writer
    finally:
        writer.close()


def through_one_buffer(tensors: Named) -> Iterator[tuple[str, torch.Tensor]]:
    """As an exporter does that gathers each tensor into the same memory; strides are kept."""
    buffer = torch.empty(max((t.untyped_storage().nbytes() for _, t in tensors), default=0), dtype=torch.uint8)
    for name, tensor in tensors:
        buffer.fill_(0xEE)
        own = buffer[: tensor.untyped_storage().nbytes()]
        own.copy_(torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()))
        yield name, own.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    buffer.fill_(0xEE)


def content(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def digest(tensor: torch.Tensor) -> str:
    kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}|"
    return hashlib.sha256(kind.encode() + content(tensor)).hexdigest()[:32]


def check_entries(manifest: Manifest, tensors: Named) -> None:
    assert [(e.name, e.shape, e.nbytes, e.digest) for e in manifest.tensors] == [
        (name, tuple(t.shape), t.numel() * t.element_size(), digest(t)) for name, t in tensors
    ]


def plain_segment(manifest: Manifest, tensors: Named, bucket_bytes: int) -> bytes:
    """Written one after the other, each content once, every tensor at a multiple of 64."""
    head = struct.pack("<8sqqQ32s", b"ALWGTS01", 0, manifest.version, bucket_bytes, manifest.digest.encode())
    segment = head.ljust(PAGE, b"\0")
    written = set()
    for _, tensor in tensors:
        if digest(tensor) not in written and tensor.numel():
            segment += b"\0" * (-len(segment) % 64) + content(tensor)
        written.add(digest(tensor))
    return segment


def plain_snapshot(folder: Path, tensors: Named, bucket_bytes: int) -> dict[str, bytes]:
    """By safetensors' own writer: the files of ``folder``, each content once."""
    shards: list[dict[str, torch.Tensor]] = []
    index: dict[str, list[str]] = {}
    placed: dict[str, list[str]] = {}
    room = -1
    for name, tensor in tensors:
        if digest(tensor) not in placed:
            if not shards or tensor.nbytes > room:
                shards.append({})
                room = bucket_bytes
            room -= tensor.nbytes
            shards[-1][name] = tensor.clone(memory_format=torch.contiguous_format)
            placed[digest(tensor)] = [f"weights-{len(shards) - 1:05d}.safetensors", name]
        index[name] = placed[digest(tensor)]
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"weights-{number:05d}.safetensors")
    (folder / "index.json").write_text(json.dumps(index, indent=1))
    return files_of(folder)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@st.composite
def models(draw: st.DrawFn) -> Named:
    """Any dtype that travels; scalars, empty and transposed tensors; few contents, so that some are equal."""
    names = draw(st.lists(st.text(min_size=1, max_size=6), unique=True, max_size=12))
    tensors: Named = []
    for name in names:
        dtype = getattr(torch, draw(st.sampled_from(sorted(ITEM_BYTES))))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        numbers = torch.randint(0, 99, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 1))))
        tensor = numbers.to(torch.float32).to(dtype)
        tensors.append((name, tensor.transpose(0, -1) if tensor.dim() > 1 and draw(st.booleans()) else tensor))
    return tensors


@given(
    tensors=models(),
    threads=st.sampled_from([1, 4]),
    bucket_bytes=st.sampled_from([64, 256, 4096]),
    block_bytes=st.sampled_from([64, 192, 1 << 20]),
    budget=st.sampled_from([1, 500, 1 << 20]),
)
@settings(max_examples=25, deadline=None)
def test_segments_and_snapshots_are_those_of_a_plain_loop(
    tensors: Named, threads: int, bucket_bytes: int, block_bytes: int, budget: int
) -> None:
    copies = HostCopies(threads=threads, budget=budget, block_bytes=block_bytes)
    with shm_writer(copies, bucket_bytes) as writer:
        for version in (7, 8):  # the second time in memory that was used before
            manifest = writer.write(version, 0, through_one_buffer(tensors))
            check_entries(manifest, tensors)
            found = segment_path(manifest.location).read_bytes()
            assert found.ljust(PAGE, b"\0") == plain_segment(manifest, tensors, bucket_bytes)
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "plain").mkdir()
        disk = DiskWriter(Path(place) / "ours", bucket_bytes=bucket_bytes, copies=copies)
        manifest = disk.write(7, 0, through_one_buffer(tensors))
        check_entries(manifest, tensors)
        assert files_of(Path(manifest.location)) == plain_snapshot(Path(place) / "plain", tensors, bucket_bytes)


@pytest.fixture
def numbered() -> Named:
    """40 tensors of 64 KiB, all different."""
    return [(f"t{number}", torch.full((2**14,), number, dtype=torch.float32)) for number in range(40)]


def no_threads() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("weights-export")]


@pytest.fixture
def failing_write(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The disk is full for whoever writes after 20 writes; the sizes of those that passed."""
    written: list[int] = []
    true = os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if len(written) >= 20:
            raise OSError(28, "No space left on device")
        written.append(len(data))
        return true(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    return written


@THREADS
def test_a_medium_that_is_full_half_way_ends_the_write_at_once(
    numbered: Named, threads: int, failing_write: list[int], tmp_path: Path
) -> None:
    asked = []

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in numbered:
            asked.append(name)
            yield name, tensor

    copies = HostCopies(threads=threads, budget=2**18, block_bytes=2**16)
    with shm_writer(copies) as writer:
        with pytest.raises(WeightUpdateError, match=r"No space left.*weights\.transport=disk"):
            writer.write(1, 0, export())
        head = segment_path(writer._names[0]).read_bytes()[:24]
        assert struct.unpack("<8sqq", head) == (b"ALWGTS01", 0, -1)
        assert len(asked) < len(numbered)
    assert no_threads()
    failing_write.clear()
    disk = DiskWriter(tmp_path / "weights", bucket_bytes=2**17, copies=copies)
    with pytest.raises(WeightUpdateError, match="No space left"):
        disk.write(1, 0, numbered)
    assert list((tmp_path / "weights").iterdir()) == []
    assert no_threads()
    failing_write.clear()
    assert disk.write(1, 0, numbered[:5]).tensors[4].digest == digest(numbered[4][1])


@THREADS
def test_what_the_exporter_raises_passes_and_the_next_write_is_whole(numbered: Named, threads: int) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from numbered[:30]
        raise RuntimeError("the exporter died")

    with shm_writer(HostCopies(threads=threads, budget=2**18, block_bytes=2**16)) as writer:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="the exporter died"):
                writer.write(1, 0, broken())
            assert no_threads()
        manifest = writer.write(1, 0, numbered)
        assert segment_path(manifest.location).read_bytes() == plain_segment(manifest, numbered, 256)
        assert no_threads()


@THREADS
def test_a_name_that_comes_twice_is_refused(threads: int) -> None:
    with (
        shm_writer(HostCopies(threads=threads)) as writer,
        pytest.raises(WeightUpdateError, match="'a' is exported twice"),
    ):
        writer.write(1, 0, [("a", torch.zeros(2)), ("b", torch.zeros(2)), ("a", torch.ones(2))])


@THREADS
def test_a_dtype_that_cannot_travel_is_refused_before_it_lies_on_a_disk(threads: int, tmp_path: Path) -> None:
    disk = DiskWriter(tmp_path, bucket_bytes=100, copies=HostCopies(threads=threads))
    with pytest.raises(WeightUpdateError, match="'a' has dtype 'complex64', which cannot travel"):
        disk.write(1, 0, [("a", torch.zeros(2, dtype=torch.complex64))])


class Held:
    """A medium whose jobs wait for ``go``."""

    collects = False

    def __init__(self, go: threading.Event) -> None:
        self._go = go
        self.names: list[str] = []

    def place(self, copy: HostCopy, entry: TensorEntry) -> tuple[Job, ...]:
        def write() -> None:
            assert self._go.wait(30)
            copy.release()

        self.names.append(entry.name)
        return (write,)

    def finish(self) -> tuple[Job, ...]:
        return ()


def test_no_more_bytes_are_in_flight_than_allowed_however_slow_the_medium_is(numbered: Named) -> None:
    copies = HostCopies(threads=2, budget=5 * 2**16, block_bytes=2**16)
    go = threading.Event()

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(numbered):
            if number == 5:  # all that may be in flight is, and nothing was written yet
                assert copies.statistics().bytes_used == 5 * 2**16
                go.set()
            yield name, tensor

    medium = Held(go)
    entries = copies.export(export(), medium)
    assert medium.names == [entry.name for entry in entries] == [name for name, _ in numbered]
    found = copies.statistics()
    assert (found.bytes_used, found.peak_bytes_used, found.bytes_kept) == (0, 5 * 2**16, 5 * 2**16)
    copies.close()
    assert copies.statistics().bytes_kept == 0


@THREADS
def test_a_tensor_that_is_larger_than_what_may_be_in_flight_is_alone_there(numbered: Named, threads: int) -> None:
    large = torch.arange(10 * 2**14, dtype=torch.float32)
    copies = HostCopies(threads=threads, budget=2 * 2**16, block_bytes=2**16)
    go = threading.Event()
    go.set()
    medium = Held(go)
    medium.collects = True  # the one thread copies as well
    entries = copies.export([*numbered[:9], ("large", large), *numbered[9:]], medium)
    assert entries[9].digest == digest(large)
    found = copies.statistics()
    assert found.peak_bytes_used <= large.nbytes + 2**16
    assert found.bytes_kept <= 2 * 2**16


def test_small_tensors_share_memory() -> None:
    copies = HostCopies(threads=4, budget=2**20, block_bytes=2**16)
    go = threading.Event()

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(100):
            yield str(number), torch.full((16,), float(number))
        go.set()

    copies.export(export(), Held(go))
    assert copies.statistics().peak_bytes_used == 2**16


def test_one_thread_reads_tensors_of_the_cpu_where_they_lie(numbered: Named) -> None:
    copies = HostCopies(threads=1)
    with shm_writer(copies) as writer:
        writer.write(1, 0, numbered)
    assert copies.statistics().peak_bytes_used == 0


@THREADS
def test_an_exporter_may_work_in_inference_mode_or_not_from_one_version_to_the_next(
    threads: int, tmp_path: Path
) -> None:
    def export(inference: bool) -> Iterator[tuple[str, torch.Tensor]]:
        with torch.inference_mode(inference):
            for number in range(3):
                yield str(number), torch.full((5,), float(number), requires_grad=not inference)

    disk = DiskWriter(tmp_path, bucket_bytes=100, copies=HostCopies(threads=threads, block_bytes=64))
    first, *others = (disk.write(1, 0, export(inference)).tensors for inference in (True, False, True))
    assert others == [first, first]


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Nothing looks for memory that leads back to itself, as nothing does for a long time where objects are few."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@THREADS
@pytest.mark.parametrize("fails", ["", "exporter", "place", "job"])
def test_memory_goes_when_the_export_has_ended_however_it_did(
    numbered: Named, threads: int, fails: str, monkeypatch: pytest.MonkeyPatch, uncollected: None
) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    allocate = host_blocks._Block.__init__

    def told(block: host_blocks._Block, nbytes: int, *, pinned: bool) -> None:
        allocate(block, nbytes, pinned=pinned)
        made.append(weakref.ref(block.memory))

    class Failing(Held):
        collects = True  # the one thread copies as well

        def place(self, copy: HostCopy, entry: TensorEntry) -> tuple[Job, ...]:
            jobs = super().place(copy, entry)
            if len(self.names) == 9 and fails == "place":
                raise ValueError("failed")
            return (partial(self.fail, copy),) if len(self.names) == 9 and fails == "job" else jobs

        def fail(self, copy: HostCopy) -> None:
            raise ValueError("failed")

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        yield from numbered[:20]
        if fails == "exporter":
            raise ValueError("failed")

    monkeypatch.setattr(host_blocks._Block, "__init__", told)
    copies = HostCopies(threads=threads, budget=2**18, block_bytes=2**16)
    go = threading.Event()
    go.set()
    with pytest.raises(ValueError, match="failed") if fails else nullcontext():
        copies.export(export(), Failing(go))
    copies.close()
    assert made
    assert not [memory for memory in made if memory() is not None]


@contextmanager
def sigint_raises() -> Iterator[None]:
    """Also where these tests run in the background of a shell, which has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("ends", ["well", "by an exporter that died", "by Ctrl-C"])
def test_ctrl_c_while_threads_are_waited_for_leaves_none_behind(
    monkeypatch: pytest.MonkeyPatch, numbered: Named, ends: str
) -> None:
    """A second one does: a thread that goes on would write into what its caller has closed, or somebody else opened."""
    copies = HostCopies(threads=3, budget=2**18, block_bytes=2**16)
    go, begun, done = threading.Event(), threading.Event(), []
    stop = host_copies._Crew.stop

    class Slow(Held):
        def place(self, copy: HostCopy, entry: TensorEntry) -> tuple[Job, ...]:
            def write() -> None:
                begun.set()
                assert go.wait(30)
                copy.release()
                done.append(entry.name)

            return (write,)

    def stopping(crew: host_copies._Crew) -> None:
        """Two signals come while it waits; only then the jobs go on."""
        true, coming = crew._changed.wait_for, [signal.SIGINT, signal.SIGINT]

        def wait_for(ready: Callable[[], bool]) -> bool:
            if threading.current_thread() is threading.main_thread():
                if coming:
                    signal.raise_signal(coming.pop())
                go.set()
            return true(ready)

        with monkeypatch.context() as patched:
            patched.setattr(crew._changed, "wait_for", wait_for)
            stop(crew)

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        yield from numbered[:2]
        assert begun.wait(10)
        if ends == "well":
            go.set()
            return
        raise KeyboardInterrupt if ends == "by Ctrl-C" else RuntimeError("the exporter died")

    with monkeypatch.context() as patched, sigint_raises():
        patched.setattr(host_copies._Crew, "stop", stopping)
        with pytest.raises(KeyboardInterrupt):
            copies.export(export(), Slow(go))
    assert done
    assert no_threads()
    assert copies.statistics().bytes_used == 0
    assert len(copies.export(numbered, Held(go))) == len(numbered)


def test_an_error_in_placing_reaches_the_caller(numbered: Named) -> None:
    class Broken(Held):
        def place(self, copy: HostCopy, entry: TensorEntry) -> tuple[Job, ...]:
            raise KeyError(entry.name)

    with pytest.raises(KeyError, match="t0"):
        HostCopies(threads=4).export(numbered, Broken(threading.Event()))
    assert no_threads()
