"""Versions through host memory into a GPU: locked pages, copies beside the model's work, loading in place."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from areal_like.api.weights import Manifest, TensorEntry, TransportKind
from areal_like.inference.vllm_plugin import host_staging, reloading
from areal_like.inference.vllm_plugin.arena import ALIGNMENT
from areal_like.inference.vllm_plugin.device_memory import CudaMemory
from areal_like.inference.vllm_plugin.host_staging import HostStaging
from areal_like.inference.vllm_plugin.loading import load_copy
from areal_like.inference.vllm_plugin.parts import Parts
from areal_like.inference.vllm_plugin.receiver import Receiver, Staged
from areal_like.inference.vllm_plugin.reloading import InPlace
from areal_like.weights.checkpoint import Expected
from areal_like.weights.digest import tensor_entry
from areal_like.weights.segments import remove_segments
from areal_like.weights.transports.base import WeightWriter, make_reader, make_writer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]
GPU = torch.device("cuda", 0)
#: of locked memory at a time: the embedding is larger
SLICE = 2**20
WIDTH, ROWS, VOCABULARY = 1024, 256, 3000
HEAD = frozenset({"lm_head.weight"})
SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (VOCABULARY, WIDTH), "norm": (WIDTH,), "lm_head.weight": (VOCABULARY, WIDTH), "none": (0, 4),
    **{f"{n}.{part}": (ROWS, WIDTH) for n in range(8) for part in "qkv"},
}  # fmt: skip
EXPECTED = Expected(shapes=SHAPES, optional={})
NEVER = (-1, -1)
Weights = dict[str, torch.Tensor]


class Model(torch.nn.Module):
    """q, k and v of a layer in one parameter, a vocabulary that is filled up, and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        kind = {"device": GPU, "dtype": torch.bfloat16}
        self.embed = torch.nn.Parameter(torch.zeros(VOCABULARY + 64, WIDTH, **kind), requires_grad=False)  # type: ignore[arg-type]
        self.norm = torch.nn.Parameter(torch.zeros(WIDTH, **kind), requires_grad=False)  # type: ignore[arg-type]
        self.none = torch.nn.Parameter(torch.zeros(0, 4, **kind), requires_grad=False)  # type: ignore[arg-type]
        self.layers = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(3 * ROWS, WIDTH, **kind), requires_grad=False)  # type: ignore[arg-type]
            for _ in range(8)
        )
        self.calls = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        self.calls += 1
        names = set()
        for name, tensor in weights:
            if name in ("embed", "norm", "none"):
                parameter = getattr(self, name)
                parameter.data[: len(tensor)].copy_(tensor)
                parameter.data[len(tensor) :].fill_(0)
                names.add(name)
            else:
                layer, part = name.split(".")
                self.layers[int(layer)].data.narrow(0, ROWS * "qkv".index(part), ROWS).copy_(tensor)
                names.add(f"layers.{layer}")
        return names

    def held(self) -> Weights:
        found = {"embed": self.embed[:VOCABULARY], "norm": self.norm, "none": self.none}
        for number, layer in enumerate(self.layers):
            found |= {f"{number}.{part}": rows for part, rows in zip("qkv", layer.split(ROWS), strict=True)}
        return found


@cache
def weights(seed: int) -> Weights:
    """25 MB of bfloat16 on the host."""
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in SHAPES.items()}
    return {**made, "lm_head.weight": made["embed"]}


@pytest.fixture
def open_writer(tmp_path: Path) -> Iterator[Callable[[TransportKind], WeightWriter]]:
    run_id, opened = f"staging-{uuid.uuid4().hex[:8]}", []

    def make(kind: TransportKind) -> WeightWriter:
        opened.append(make_writer(kind, run_id=run_id, directory=tmp_path, bucket_bytes=2**20))
        return opened[-1]

    yield make
    for writer in opened:
        writer.close()
    assert remove_segments(run_id) == ()


class Limited(CudaMemory):
    """Promises ``room`` bytes, whatever is free."""

    def __init__(self, room: int) -> None:
        super().__init__(GPU)
        self.room = room

    def free(self) -> int:
        return self.room


@pytest.fixture
def open_receiver() -> Iterator[Callable[[CudaMemory], Receiver]]:
    opened = []

    def make(memory: CudaMemory) -> Receiver:
        opened.append(Receiver(GPU, host=HostStaging(memory, threads=4, held_back=HEAD, slice_bytes=SLICE)))
        return opened[-1]

    yield make
    for receiver in opened:
        receiver.close()


def staged(receiver: Receiver, manifest: Manifest) -> Staged:
    receiver.stage(manifest, EXPECTED, newest=NEVER)
    deadline = time.monotonic() + 60
    while receiver.state == "staging":
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert receiver.state == "staged", receiver.error
    return receiver.take()


def check_places(found: Staged, on_device: bool) -> None:
    for name, tensor in found.tensors.items():
        if not tensor.nbytes:
            continue
        there = on_device and name not in HEAD
        assert tensor.device == (GPU if there else torch.device("cpu")), name
        assert there or tensor.is_pinned(), name
        assert tensor.data_ptr() % ALIGNMENT == 0, name


def load(model: Model, in_place: InPlace, found: Staged) -> bool:
    """As the engine does; whether it was in place."""
    manifest, calls = found.manifest, model.calls
    travelling = [entry for entry in manifest.tensors if entry.name not in HEAD]
    load_copy(
        model, found.copy, held_back=HEAD, reloading=nullcontext(), wait=torch.cuda.synchronize, parts=Parts(),
        placement=in_place.loader(travelling),
    )  # fmt: skip
    in_place.prove_by(manifest, HEAD, found.copy)
    found.copy.release()
    return model.calls == calls


def check_model(model: Model, sent: Weights) -> None:
    held = model.held()
    assert all(torch.equal(held[name].cpu(), tensor) for name, tensor in sent.items() if name not in HEAD)
    assert not model.embed[VOCABULARY:].any()


@pytest.mark.parametrize("kind", [TransportKind.SHM, TransportKind.DISK, TransportKind.COLLECTIVE])
@pytest.mark.parametrize("room", [0, 2**40])
def test_versions_are_loaded_in_place_from_where_they_were_staged(
    monkeypatch: pytest.MonkeyPatch,
    open_writer: Callable[[TransportKind], WeightWriter],
    open_receiver: Callable[[CudaMemory], Receiver],
    kind: TransportKind,
    room: int,
) -> None:
    monkeypatch.setattr(reloading, "_check_copies_alone", lambda model, config: None)
    writer, receiver, model = open_writer(kind), open_receiver(Limited(room)), Model()
    in_place = InPlace(model, None)
    in_place.prepare([tensor_entry(name, tensor) for name, tensor in weights(0).items() if name not in HEAD])
    model.calls = 0
    ways, addresses = [], []
    for version in range(4):
        found = staged(receiver, writer.write(version, 0, weights(version).items()))
        check_places(found, on_device=room > 0)
        addresses.append(
            [tensor.data_ptr() for tensor in found.tensors.values() if tensor.device.type == "cpu" and tensor.nbytes]
        )
        ways.append(load(model, in_place, found))
        check_model(model, weights(version))
    assert ways == [False, True, True, True]
    assert addresses[0] == addresses[1] == addresses[2] == addresses[3]


def test_half_of_the_room_is_used_and_given_back(
    open_writer: Callable[[TransportKind], WeightWriter], open_receiver: Callable[[CudaMemory], Receiver]
) -> None:
    writer, receiver = open_writer(TransportKind.SHM), open_receiver(Limited(28 * 2**20))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, allocated = torch.cuda.mem_get_info(GPU)[0], torch.cuda.memory_allocated(GPU)
    for version in range(3):
        found = staged(receiver, writer.write(version, 0, weights(version).items()))
        there = sum(tensor.nbytes for tensor in found.tensors.values() if tensor.device == GPU)
        assert 13 * 2**20 < there <= 14 * 2**20
        assert all(tensor.device == GPU or tensor.is_pinned() for tensor in found.tensors.values() if tensor.nbytes)
        assert all(torch.equal(found.tensors[name].cpu(), tensor) for name, tensor in weights(version).items())
        if version == 1:
            found.copy.release()
        else:  # a version that is staged and never loaded
            receiver.stage(found.manifest, EXPECTED, newest=NEVER)
            found.copy.release()
            receiver.discard()
            while any(thread.name.startswith("stage-weights") for thread in threading.enumerate()):
                time.sleep(0.001)
        assert torch.cuda.memory_allocated(GPU) == allocated
        assert torch.cuda.mem_get_info(GPU)[0] >= before - 8 * 2**20


def test_a_device_without_room_fails_no_staging(
    open_writer: Callable[[TransportKind], WeightWriter], open_receiver: Callable[[CudaMemory], Receiver]
) -> None:
    """Half of ``free`` was promised, and somebody else took it."""
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info(GPU)[1]
    manifest = open_writer(TransportKind.SHM).write(1, 0, weights(1).items())
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(GPU) + 4 * 2**20) / total, GPU)
    try:
        found = staged(open_receiver(Limited(2**40)), manifest)
        check_places(found, on_device=False)
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in weights(1).items())
        found.copy.release()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, GPU)


def test_what_the_server_has_lent_is_nobodys_to_take(
    open_writer: Callable[[TransportKind], WeightWriter], open_receiver: Callable[[CudaMemory], Receiver]
) -> None:
    writer, memory = open_writer(TransportKind.SHM), CudaMemory(GPU)
    receiver = open_receiver(memory)
    for version, lent in enumerate((False, True)):
        memory.lent = lent
        found = staged(receiver, writer.write(version, 0, weights(version).items()))
        check_places(found, on_device=not lent)
        found.copy.release()


def test_copies_go_beside_what_the_model_computes(
    open_writer: Callable[[TransportKind], WeightWriter], open_receiver: Callable[[CudaMemory], Receiver]
) -> None:
    """A device that is at work for a second stages meanwhile."""
    manifest = open_writer(TransportKind.SHM).write(1, 0, weights(1).items())
    receiver = open_receiver(Limited(2**40))
    staged(receiver, manifest).copy.release()  # memory is there now
    busy = torch.cuda.Event()
    torch.cuda._sleep(6_000_000_000)  # cycles: seconds
    busy.record()
    found = staged(receiver, manifest)
    assert not busy.query(), "it waited for the model"
    torch.cuda.synchronize()
    assert all(torch.equal(found.tensors[name].cpu(), tensor) for name, tensor in weights(1).items())
    found.copy.release()


class Held:
    """A reader that stops before one tensor of version 1 until it may go on."""

    concurrent, device = True, torch.device("cpu")

    def __init__(self, manifest: Manifest, held: threading.Event, go: threading.Event) -> None:
        self._reader, self._manifest, self._held, self._go = make_reader(manifest), manifest, held, go

    def read_into(self, entry: TensorEntry, target: torch.Tensor) -> None:
        if self._manifest.version == 1 and entry.name == "3.q":
            self._held.set()
            assert self._go.wait(60)
        self._reader.read_into(entry, target)

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *what: object) -> None:
        self._reader.__exit__(None, None, None)


def test_a_thread_that_was_left_behind_keeps_the_locked_memory(
    monkeypatch: pytest.MonkeyPatch,
    open_writer: Callable[[TransportKind], WeightWriter],
    open_receiver: Callable[[CudaMemory], Receiver],
) -> None:
    writer, receiver = open_writer(TransportKind.DISK), open_receiver(Limited(0))
    held, go = threading.Event(), threading.Event()
    monkeypatch.setattr(host_staging, "make_reader", lambda manifest: Held(manifest, held, go))
    receiver.stage(writer.write(1, 0, weights(1).items()), EXPECTED, newest=NEVER)
    assert held.wait(60)
    left = [thread for thread in threading.enumerate() if thread.name.startswith("stage-weights")]
    second = staged(receiver, writer.write(2, 0, weights(2).items()))
    assert not any(tensor.is_pinned() for tensor in second.tensors.values() if tensor.nbytes)
    go.set()
    for thread in left:
        thread.join(60)
    model = Model()
    with torch.no_grad():
        model.load_weights(second.copy.plain(HEAD))
    check_model(model, weights(2))
    second.copy.release()
    third = staged(receiver, writer.write(3, 0, weights(3).items()))
    check_places(third, on_device=False)
    third.copy.release()


def test_closed_the_pages_are_free_again(
    open_writer: Callable[[TransportKind], WeightWriter], open_receiver: Callable[[CudaMemory], Receiver]
) -> None:
    receiver = open_receiver(Limited(0))
    found = staged(receiver, open_writer(TransportKind.SHM).write(1, 0, weights(1).items()))
    tensor = found.tensors["norm"]
    assert tensor.is_pinned()
    receiver.close()
    assert tensor.is_pinned(), "it is still to be loaded"
    found.copy.release()
    assert not tensor.is_pinned()
