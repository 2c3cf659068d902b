"""Buckets through real groups over loopback: several readers, late ones, and ones that are lost on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from areal_like.api.weights import Manifest, TransportKind
from areal_like.errors import WeightUpdateError
from areal_like.weights.digest import parse_dtype
from areal_like.weights.transports.base import WeightWriter, make_reader, make_writer
from areal_like.weights.transports.collective import CALL_TIMEOUT
from areal_like.weights.transports.meeting import Meeting, reach_store

#: several buckets of 4,096 bytes, one tensor split over many, and one without elements
WEIGHTS = {
    "a": torch.arange(700.0),
    "empty": torch.empty(0, 3),
    "b": torch.arange(9).to(torch.bfloat16),
    "large": torch.arange(40_000, dtype=torch.float32).reshape(200, 200),
}


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[WeightWriter]:
    opened = make_writer(TransportKind.COLLECTIVE, run_id="x", directory=tmp_path, bucket_bytes=4096)
    yield opened
    opened.close()


def read(manifest: Manifest) -> dict[str, torch.Tensor]:
    received = {}
    with make_reader(manifest) as reader:
        for entry in manifest.tensors:
            received[entry.name] = torch.empty(entry.shape, dtype=parse_dtype(entry.dtype))
            reader.read_into(entry, received[entry.name])
    return received


def whole(received: dict[str, torch.Tensor], add: float = 0.0) -> bool:
    return all(torch.equal(received[name], tensor + add) for name, tensor in WEIGHTS.items())


def test_one_reader_gets_every_byte(writer: WeightWriter) -> None:
    assert whole(read(writer.write(1, 0, WEIGHTS.items())))


def test_readers_meet_in_one_group_or_in_the_next(writer: WeightWriter) -> None:
    with ThreadPoolExecutor(3) as threads:
        for version in range(1, 4):
            manifest = writer.write(version, 0, ((n, t + version) for n, t in WEIGHTS.items()))
            reading = [threads.submit(read, manifest) for _ in range(3)]
            assert all(whole(each.result(60), version) for each in reading)


def test_a_late_reader_gets_the_same_version(writer: WeightWriter) -> None:
    manifest = writer.write(1, 0, WEIGHTS.items())
    assert whole(read(manifest))
    assert whole(read(manifest))


def test_a_group_is_rebuilt_without_a_reader_that_was_lost(writer: WeightWriter) -> None:
    """Two readers; one leaves after the first tensor. The other gets everything, and so do both the next time."""
    manifest = writer.write(1, 0, WEIGHTS.items())
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(read, manifest) for _ in range(2)]  # from here on two are expected
        assert all(whole(each.result(60)) for each in both)
        manifest = writer.write(2, 0, WEIGHTS.items())
        lost = threading.Event()

        def leave() -> None:
            with pytest.raises(ZeroDivisionError), make_reader(manifest) as reader:
                reader.read_into(manifest.tensors[0], torch.empty(700))
                lost.set()
                raise ZeroDivisionError

        leaving: Future[None] = threads.submit(leave)
        staying = threads.submit(read, manifest)
        leaving.result(60)
        assert lost.is_set()
        assert whole(staying.result(60))


def test_a_reader_that_is_lost_before_its_group_is_made_holds_up_no_publication(writer: WeightWriter) -> None:
    """The sender waits for it, at a connection of its own."""
    meeting = Meeting.parse(writer.write(1, 0, WEIGHTS.items()).location)
    store = reach_store(meeting, "version 1", timeout=20)
    store.add(f"{meeting.key}/0/joined", 1)
    store.wait([f"{meeting.key}/0/group/0/0"])  # its own address; then it waits for ours
    began = time.monotonic()
    writer.write(2, 0, WEIGHTS.items())
    assert time.monotonic() - began < CALL_TIMEOUT / 2


def test_a_version_that_is_over_is_refused(writer: WeightWriter) -> None:
    old = writer.write(1, 0, WEIGHTS.items())
    writer.write(2, 0, WEIGHTS.items())
    with pytest.raises(WeightUpdateError, match="no longer offered"):
        read(old)


def test_a_trainer_that_is_gone_is_an_error(writer: WeightWriter) -> None:
    manifest = writer.write(1, 0, WEIGHTS.items())
    elsewhere = Meeting.parse(manifest.location)
    gone = Meeting(host="127.0.0.1", port=1, key=elsewhere.key, bucket_bytes=4096, backend="gloo").location()
    with pytest.raises(WeightUpdateError, match="does not answer"):
        make_reader(manifest.model_copy(update={"location": gone}))


def test_tensors_must_be_asked_for_in_order(writer: WeightWriter) -> None:
    manifest = writer.write(1, 0, WEIGHTS.items())
    with pytest.raises(WeightUpdateError, match="keep the order"), make_reader(manifest) as reader:
        reader.read_into(manifest.tensors[3], torch.empty(200, 200))
        reader.read_into(manifest.tensors[0], torch.empty(700))


def test_locations_read_back() -> None:
    meeting = Meeting(host="10.0.0.7", port=29500, key="abc.v1.i0", bucket_bytes=4096, backend="nccl")
    assert Meeting.parse(meeting.location()) == meeting
    with pytest.raises(WeightUpdateError, match="is no location"):
        Meeting.parse("/tmp/somewhere")
