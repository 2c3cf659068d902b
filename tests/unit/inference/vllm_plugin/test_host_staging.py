"""Versions through host memory on a worker with a GPU, over real transports and the real receiver; the GPU's memory is
host memory (``host_memory``).
"""

from __future__ import annotations

import gc
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_like.api.weights import Manifest, TensorEntry, TransportKind
from areal_like.errors import WeightUpdateError
from areal_like.inference.vllm_plugin import host_staging
from areal_like.inference.vllm_plugin.arena import lay_out
from areal_like.inference.vllm_plugin.host_staging import HostStaging
from areal_like.inference.vllm_plugin.receiver import Receiver, Staged
from areal_like.inference.vllm_plugin.staged_copy import StagedCopy
from areal_like.weights.checkpoint import Expected
from areal_like.weights.segments import remove_segments
from areal_like.weights.transports.base import WeightWriter, make_reader, make_writer
from tests.unit.inference.vllm_plugin.host_memory import HostMemory

PAGE = 4096
MANY = 2**30
SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (50, 64), "none": (0, 4), "scalar": (), "norm": (7,), **{f"layer.{n}": (10 + n, 9) for n in range(12)}
}  # fmt: skip
EXPECTED = Expected(shapes=SHAPES, optional={"lm_head.weight": (50, 64)})
NEVER = (-1, -1)
HOSTS = [TransportKind.SHM, TransportKind.DISK, TransportKind.COLLECTIVE]


def weights(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


@pytest.fixture
def open_writer(tmp_path: Path) -> Iterator[Callable[[TransportKind], WeightWriter]]:
    run_id, opened = f"staging-{uuid.uuid4().hex[:8]}", []

    def make(kind: TransportKind = TransportKind.SHM) -> WeightWriter:
        opened.append(make_writer(kind, run_id=run_id, directory=tmp_path, bucket_bytes=4096))
        return opened[-1]

    yield make
    for writer in opened:
        writer.close()
    assert remove_segments(run_id) == ()


def receiver(memory: HostMemory, *, threads: int = 3, held_back: frozenset[str] = frozenset()) -> Receiver:
    return Receiver(host=HostStaging(memory, threads=threads, held_back=held_back, slice_bytes=PAGE))


def until_done(ours: Receiver) -> str:
    deadline = time.monotonic() + 10
    while ours.state == "staging":
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return ours.state


def staged(ours: Receiver, manifest: Manifest) -> Staged:
    ours.stage(manifest, EXPECTED, newest=NEVER)
    assert until_done(ours) == "staged", ours.error
    return ours.take()


def check(found: Staged, sent: dict[str, torch.Tensor]) -> None:
    assert list(found.tensors) == list(sent)
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in sent.items())
    assert all(found.tensors[name].dtype == tensor.dtype for name, tensor in sent.items())


def places(found: Staged, memory: HostMemory) -> dict[str, str]:
    return {name: memory.holds(tensor) for name, tensor in found.tensors.items() if tensor.nbytes}


@pytest.mark.parametrize("kind", HOSTS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("room", [0, MANY])
def test_a_version_lies_where_there_is_room_and_the_memory_stays_the_same(
    open_writer: Callable[[TransportKind], WeightWriter], kind: TransportKind, threads: int, room: int
) -> None:
    writer, memory, addresses = open_writer(kind), HostMemory(room), []
    ours = receiver(memory, threads=threads)
    for version in range(3):
        found = staged(ours, writer.write(version, 0, weights(version).items()))
        check(found, weights(version))
        assert set(places(found, memory).values()) == {"device" if room else "locked"}
        assert found.copy.on_device == ({name for name, shape in SHAPES.items() if 0 not in shape} if room else set())
        addresses.append([tensor.data_ptr() for tensor in found.tensors.values()])
        found.copy.release()
        assert memory.given_back == (version + 1 if room else 0)
    if not room:
        assert addresses[0] == addresses[1] == addresses[2]
    registered = memory.registered
    ours.close()
    assert not memory.locked
    assert registered == len(lay_out([tensor.nbytes for tensor in weights(0).values()], PAGE).cuts) > 2, "once"


def test_half_of_what_is_free_on_the_device_is_used(open_writer: Callable[..., WeightWriter]) -> None:
    sizes = {name: -(-tensor.nbytes // 256) * 256 for name, tensor in weights(1).items()}
    room = 2 * (sum(sizes.values()) - 1)  # all but the last, of 512 bytes
    memory = HostMemory(room)
    found = staged(receiver(memory), open_writer().write(1, 0, weights(1).items()))
    check(found, weights(1))
    assert sum(sizes[name] for name in found.copy.on_device) == sum(sizes.values()) - 512 <= room // 2
    assert sum(block.nbytes for block in memory.blocks) <= room // 2


def test_a_device_that_is_full_after_all_fails_no_staging(open_writer: Callable[..., WeightWriter]) -> None:
    memory = HostMemory(MANY)
    memory.real_room = 0
    ours = receiver(memory)
    found = staged(ours, open_writer().write(1, 0, weights(1).items()))
    check(found, weights(1))
    assert set(places(found, memory).values()) == {"locked"}
    found.copy.release()
    assert memory.given_back == 0, "there was nothing"


def test_without_locked_pages_all_goes_as_before(open_writer: Callable[..., WeightWriter]) -> None:
    for room, where in ((0, "pageable"), (MANY, "device")):
        memory = HostMemory(room, lockable=0)
        found = staged(receiver(memory), open_writer().write(1, 0, weights(1).items()))
        check(found, weights(1))
        assert set(places(found, memory).values()) == {where}


def test_what_nobody_loads_takes_no_room_on_the_device(open_writer: Callable[..., WeightWriter]) -> None:
    memory = HostMemory(MANY)
    sent = {**weights(1), "lm_head.weight": weights(1)["embed"]}
    ours = receiver(memory, held_back=frozenset({"lm_head.weight"}))
    found = staged(ours, open_writer().write(1, 0, sent.items()))
    check(found, sent)
    assert places(found, memory)["lm_head.weight"] == "locked"
    assert places(found, memory)["embed"] == "device"


def test_what_is_discarded_gives_back_what_it_held(open_writer: Callable[..., WeightWriter]) -> None:
    memory, writer = HostMemory(MANY), open_writer()
    ours = receiver(memory)
    ours.stage(writer.write(1, 0, weights(1).items()), EXPECTED, newest=NEVER)
    assert until_done(ours) == "staged"
    assert memory.blocks
    ours.discard()
    assert not memory.blocks
    memory.room = 0
    assert set(places(staged(ours, writer.write(2, 0, weights(2).items())), memory).values()) == {"locked"}


Before = Callable[[Manifest, TensorEntry], None]
After = Callable[[Manifest, TensorEntry, torch.Tensor], None]


class Watched:
    """A reader whose reads are seen, held up or damaged."""

    def __init__(self, manifest: Manifest, before: Before, after: After) -> None:
        self._reader = make_reader(manifest)
        self._manifest, self._before, self._after = manifest, before, after
        self.device, self.concurrent = self._reader.device, self._reader.concurrent

    def read_into(self, entry: TensorEntry, target: torch.Tensor) -> None:
        self._before(self._manifest, entry)
        self._reader.read_into(entry, target)
        self._after(self._manifest, entry, target)

    def __enter__(self) -> Watched:
        self._reader.__enter__()
        return self

    def __exit__(self, *what: object) -> None:
        self._reader.__exit__(*what)  # type: ignore[arg-type]


def nothing(*told: object) -> None:
    pass


def watch(monkeypatch: pytest.MonkeyPatch, before: Before = nothing, after: After = nothing) -> None:
    monkeypatch.setattr(host_staging, "make_reader", lambda manifest: Watched(manifest, before, after))


@pytest.mark.parametrize("kind", [TransportKind.SHM, TransportKind.DISK])
def test_several_threads_read_at_once(
    monkeypatch: pytest.MonkeyPatch, open_writer: Callable[..., WeightWriter], kind: TransportKind
) -> None:
    together = threading.Barrier(3)
    first = threading.local()

    def before(manifest: Manifest, entry: TensorEntry) -> None:
        if not getattr(first, "seen", False):
            first.seen = True
            together.wait(10)  # breaks, and fails the staging, if fewer than three come

    watch(monkeypatch, before)
    check(staged(receiver(HostMemory()), open_writer(kind).write(1, 0, weights(1).items())), weights(1))


def test_a_stream_is_read_in_order_by_one_thread_at_a_time(
    monkeypatch: pytest.MonkeyPatch, open_writer: Callable[..., WeightWriter]
) -> None:
    reading, order = threading.Lock(), []

    def before(manifest: Manifest, entry: TensorEntry) -> None:
        assert reading.acquire(blocking=False), "two at once"
        order.append(entry.name)
        reading.release()

    watch(monkeypatch, before)
    manifest = open_writer(TransportKind.COLLECTIVE).write(1, 0, weights(1).items())
    check(staged(receiver(HostMemory()), manifest), weights(1))
    assert order == list(SHAPES)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_error_is_told_and_ends_the_others(
    monkeypatch: pytest.MonkeyPatch, open_writer: Callable[..., WeightWriter], threads: int
) -> None:
    """``embed`` is damaged on its way, and whoever has another tensor waits until that is known."""
    writer, memory = open_writer(), HostMemory(MANY)
    read: list[str] = []
    known, verify, work = threading.Event(), host_staging._verify, host_staging._Crew._work

    def damage(manifest: Manifest, entry: TensorEntry, target: torch.Tensor) -> None:
        read.append(entry.name)
        if manifest.version == 1 and entry.name == "embed":
            target.view(torch.uint8)[7, 9] ^= 1

    def told(entry: TensorEntry, target: torch.Tensor) -> None:
        verify(entry, target)
        assert threads == 1 or known.wait(10)

    def works(crew: host_staging._Crew[Any]) -> None:
        work(crew)
        known.set()  # the first to end is the one that failed

    watch(monkeypatch, after=damage)
    monkeypatch.setattr(host_staging, "_verify", told)
    monkeypatch.setattr(host_staging._Crew, "_work", works)
    ours = receiver(memory, threads=threads)
    ours.stage(writer.write(1, 0, weights(1).items()), EXPECTED, newest=NEVER)
    assert until_done(ours) == "failed"
    assert "tensor 'embed': its bytes have digest" in ours.error
    assert len(read) <= threads, "the others went on"
    assert not memory.blocks
    monkeypatch.setattr(host_staging, "_verify", verify)
    memory.room = 0
    again = staged(ours, writer.write(2, 0, weights(2).items()))
    assert set(places(again, memory).values()) == {"locked"}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("room", [None, 0, MANY])
@pytest.mark.parametrize("fails", ["read", "verify", "copy"])
def test_memory_of_a_staging_that_failed_goes_with_it(
    monkeypatch: pytest.MonkeyPatch,
    open_writer: Callable[..., WeightWriter],
    fails: str,
    room: int | None,
    threads: int,
) -> None:
    """At once, and not when somebody looks for what leads back to itself: a few objects may hold many bytes."""
    targets: list[weakref.ref[torch.Tensor]] = []
    add, target = StagedCopy.add, StagedCopy.target

    def told(copy: StagedCopy, entry: TensorEntry) -> torch.Tensor:
        made = target(copy, entry)
        targets.append(weakref.ref(made))
        return made

    def breaks(copy: StagedCopy, entry: TensorEntry, verified: torch.Tensor) -> None:
        add(copy, entry, verified)
        if entry.name == "embed" and fails == "copy":
            raise RuntimeError("failed")

    def damage(manifest: Manifest, entry: TensorEntry, target: torch.Tensor) -> None:
        if entry.name == "embed" and fails == "verify":
            target.view(torch.uint8)[7, 9] ^= 1
        if entry.name == "embed" and fails == "read":
            raise RuntimeError("failed")

    monkeypatch.setattr(StagedCopy, "target", told)
    monkeypatch.setattr(StagedCopy, "add", breaks)
    watch(monkeypatch, after=damage)
    manifest = open_writer().write(1, 0, weights(1).items())
    staging = HostStaging(None if room is None else HostMemory(room), threads=threads, slice_bytes=PAGE)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises((RuntimeError, WeightUpdateError), match=r"failed|its bytes have digest"):
            staging.fetch(manifest, lambda: False)
        staging.close()
        assert targets
        assert not [tensor for tensor in targets if tensor() is not None]
    finally:
        gc.enable()


def test_a_thread_that_was_left_behind_keeps_the_locked_memory_and_nobody_else_writes_there(
    monkeypatch: pytest.MonkeyPatch, open_writer: Callable[..., WeightWriter]
) -> None:
    writer, memory = open_writer(), HostMemory(0)
    ours = receiver(memory)
    held, go = threading.Event(), threading.Event()

    def before(manifest: Manifest, entry: TensorEntry) -> None:
        if manifest.version == 1 and entry.name == "layer.3":
            held.set()
            assert go.wait(10)

    watch(monkeypatch, before)
    ours.stage(writer.write(1, 0, weights(1).items()), EXPECTED, newest=NEVER)
    assert held.wait(10)
    zombies = [thread for thread in threading.enumerate() if thread.name.startswith("stage-weights")]
    second = staged(ours, writer.write(2, 0, weights(2).items()))
    assert set(places(second, memory).values()) == {"pageable"}
    go.set()
    for zombie in zombies:
        zombie.join(10)
    check(second, weights(2))
    assert ours.state == "idle"
    third = staged(ours, writer.write(3, 0, weights(3).items()))
    assert set(places(third, memory).values()) == {"locked"}
    fourth = staged(ours, writer.write(4, 0, weights(4).items()))  # the third is still being loaded
    assert set(places(fourth, memory).values()) == {"pageable"}
    check(third, weights(3))


def test_a_worker_without_a_gpu_reads_in_order_in_one_thread(
    monkeypatch: pytest.MonkeyPatch, open_writer: Callable[..., WeightWriter]
) -> None:
    order: list[tuple[str, str]] = []
    watch(monkeypatch, lambda manifest, entry: order.append((entry.name, threading.current_thread().name)))
    check(staged(Receiver(), open_writer().write(1, 0, weights(1).items())), weights(1))
    assert order == [(name, "stage-weights") for name in SHAPES]
