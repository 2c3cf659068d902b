"""Staging in a vLLM worker, without vLLM: over shared memory, with real threads."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from areal_like.api.weights import Manifest, TensorEntry, TransportKind
from areal_like.errors import StaleCommand, WeightUpdateError
from areal_like.inference.vllm_plugin.delivery import Source
from areal_like.inference.vllm_plugin.receiver import Receiver
from areal_like.weights.checkpoint import Expected
from areal_like.weights.device_digest import device_digest
from areal_like.weights.manifest import make_manifest
from areal_like.weights.segments import remove_segments
from areal_like.weights.transports.base import WeightWriter, make_writer

WEIGHTS = {"embed": torch.arange(12.0).reshape(3, 4), "norm": torch.ones(4)}
EXPECTED = Expected(shapes={"embed": (3, 4), "norm": (4,)}, optional={"head": (3, 4)})
NEVER = (-1, -1)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[WeightWriter]:
    run_id = f"receiver-{uuid.uuid4().hex[:8]}"
    opened = make_writer(TransportKind.SHM, run_id=run_id, directory=tmp_path, bucket_bytes=4096)
    yield opened
    opened.close()
    assert remove_segments(run_id) == ()


def written(writer: WeightWriter, version: int = 1, **more: torch.Tensor) -> Manifest:
    return writer.write(version, 0, {**WEIGHTS, **more}.items())


def until_done(receiver: Receiver) -> str:
    deadline = time.monotonic() + 10
    while receiver.state == "staging":
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return receiver.state


def test_what_was_written_is_staged_and_taken_once(writer: WeightWriter) -> None:
    receiver = Receiver()
    receiver.stage(written(writer, head=WEIGHTS["embed"]), EXPECTED, newest=NEVER)
    assert until_done(receiver) == "staged"
    staged = receiver.take()
    assert torch.equal(staged.tensors["embed"], WEIGHTS["embed"])
    with pytest.raises(WeightUpdateError, match="no version is staged"):
        receiver.take()


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"embed": torch.ones(3, 4)}, "'norm' is missing"),
        ({**WEIGHTS, "norm": torch.ones(5)}, r"'norm' has shape \(5,\), the model's is \(4,\)"),
        ({**WEIGHTS, "other": torch.ones(1)}, "no tensor 'other'"),
        ({**WEIGHTS, "norm": torch.ones(4, dtype=torch.int32)}, "which is no weight"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused_before_a_byte_is_fetched(
    writer: WeightWriter, tensors: dict[str, torch.Tensor], said: str
) -> None:
    receiver = Receiver()
    with pytest.raises(WeightUpdateError, match=said):
        receiver.stage(writer.write(1, 0, tensors.items()), EXPECTED, newest=NEVER)
    assert receiver.state == "idle"


def test_bytes_that_were_overwritten_fail_the_staging(writer: WeightWriter) -> None:
    manifest = written(writer, 1)
    for version in (2, 3):  # two segments take turns: the third version lies where the first did
        written(writer, version)
    receiver = Receiver()
    receiver.stage(manifest, EXPECTED, newest=NEVER)
    assert until_done(receiver) == "failed"
    assert "no longer holds version 1" in receiver.error
    receiver.stage(written(writer, 4), EXPECTED, newest=NEVER)
    assert until_done(receiver) == "staged"


def test_an_older_version_is_refused(writer: WeightWriter) -> None:
    with pytest.raises(StaleCommand):
        Receiver().stage(written(writer, 4), EXPECTED, newest=(0, 5))


def test_a_thread_that_waits_for_a_trainer_that_hangs_is_left_behind(tmp_path: Path, writer: WeightWriter) -> None:
    """The snapshot's index is a pipe that nobody writes: the thread hangs in ``open``."""
    snapshot = tmp_path / "v00000001-i0"
    snapshot.mkdir()
    os.mkfifo(snapshot / "index.json")
    ours = written(writer)
    hanging = ours.model_copy(update={"transport": TransportKind.DISK, "location": str(snapshot)})
    receiver = Receiver()
    receiver.stage(hanging, EXPECTED, newest=NEVER)
    receiver.discard()
    assert receiver.state == "idle"
    receiver.stage(ours, EXPECTED, newest=NEVER)
    assert until_done(receiver) == "staged"
    with (snapshot / "index.json").open("w") as pipe:  # lets the thread go
        pipe.write("{}")
    assert receiver.state == "staged"


class Coming:
    """A version from GPU to GPU, as far as the receiver sees it."""

    def __init__(self, error: str = "") -> None:
        self.error, self.left, self.prepared = error, 0, threading.Event()
        self.go = threading.Event()

    def prepare(self) -> None:
        self.prepared.set()
        self.go.wait(10)
        if self.error:
            raise WeightUpdateError(self.error)

    def receive(self, take: Callable[[Source], None]) -> None:
        raise AssertionError("that is the engine's part")

    def leave(self) -> None:
        self.left += 1


def between_gpus(version: int = 1) -> Manifest:
    entries = [
        TensorEntry(name=name, dtype="float32", shape=tuple(t.shape), nbytes=t.nbytes, digest=device_digest(t))
        for name, t in WEIGHTS.items()
    ]
    return make_manifest(version, 0, TransportKind.COLLECTIVE, "tcp://h:1/k?bucket_bytes=1&backend=nccl", entries)


def test_what_comes_from_gpu_to_gpu_is_prepared_and_handed_on() -> None:
    coming = Coming()
    receiver = Receiver(deliver=lambda manifest: coming)
    receiver.stage(between_gpus(), EXPECTED, newest=NEVER)
    assert coming.prepared.wait(10)
    assert receiver.state == "staging"
    coming.go.set()
    assert until_done(receiver) == "staged"
    staged = receiver.take()
    assert staged.delivery is coming
    assert not staged.tensors
    assert coming.left == 0
    receiver.discard()
    assert coming.left == 0


def test_a_delivery_that_is_not_wanted_any_more_is_left() -> None:
    coming = Coming()
    receiver = Receiver(deliver=lambda manifest: coming)
    receiver.stage(between_gpus(), EXPECTED, newest=NEVER)
    receiver.discard()
    assert coming.left == 1
    coming.go.set()
    assert receiver.state == "idle"


def test_a_delivery_that_fails_to_prepare_is_told() -> None:
    coming = Coming(error="the trainer is gone")
    coming.go.set()
    receiver = Receiver(deliver=lambda manifest: coming)
    receiver.stage(between_gpus(), EXPECTED, newest=NEVER)
    assert until_done(receiver) == "failed"
    assert "the trainer is gone" in receiver.error


def test_a_server_without_a_gpu_refuses_what_comes_from_one() -> None:
    with pytest.raises(WeightUpdateError, match="this server has no GPU"):
        Receiver().stage(between_gpus(), EXPECTED, newest=NEVER)
