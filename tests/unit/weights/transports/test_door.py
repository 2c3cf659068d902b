"""The door of the collective transport, with an engine in a process of its own that makes its group as SGLang does."""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import torch

from areal_like.api.weights import Manifest
from areal_like.weights.nccl import NcclGroups
from areal_like.weights.transports.base import make_reader
from areal_like.weights.transports.collective import CollectiveWriter
from areal_like.weights.transports.door import CALL_TIMEOUT
from areal_like.weights.transports.nccl import NcclWriter

WEIGHTS = {
    "a": torch.linspace(-1, 1, 3000),  # in two buckets
    "b": torch.arange(100, dtype=torch.int64).to(torch.bfloat16),
    "c": torch.tensor([[1.5, 2.5]]),
}

#: as sglang.srt.utils.init_custom_process_group: rendezvous, the group's name as prefix, then torch's own helper
_ENGINE = """
import hashlib, sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous
address, name, sizes, backend, device = sys.argv[1:]
if device != "cpu":
    torch.cuda.set_device(device)
store, rank, world = next(rendezvous(address, 1, 2, timeout=timedelta(seconds=60)))
group, _ = _new_process_group_helper(
    world, rank, [], Backend(backend), PrefixStore(name, store), group_name=name, timeout=timedelta(seconds=60)
)
_world.pg_group_ranks[group] = {0: 0, 1: 1}
print("joined", flush=True)
for size in map(int, sizes.split(",")):
    flat = torch.empty(size, dtype=torch.uint8, device=device)
    dist.broadcast(flat, src=0, group=group)
    print(hashlib.sha256(flat.cpu().numpy()).hexdigest(), flush=True)
"""


def raw(*names: str) -> bytes:
    return b"".join(WEIGHTS[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name in names)


@pytest.fixture
def writer() -> Iterator[CollectiveWriter]:
    made = CollectiveWriter(host="127.0.0.1", bucket_bytes=8192)
    yield made
    made.close()


@pytest.fixture
def manifest(writer: CollectiveWriter) -> Manifest:
    return writer.write(1, 0, iter(WEIGHTS.items()))


class Guest:
    """A control at the door."""

    def __init__(self, manifest: Manifest) -> None:
        parts = urlsplit(manifest.location)
        self.store = f"tcp://{parts.hostname}:{parts.port}"
        self.key = parts.path.lstrip("/")
        self.connection = socket.create_connection(("127.0.0.1", int(parse_qs(parts.query)["door"][0])), timeout=90)
        self.stream = self.connection.makefile("rwb")

    def say(self, **question: Any) -> dict[str, Any]:
        self.stream.write(json.dumps({"key": self.key, **question}).encode() + b"\n")
        self.stream.flush()
        return self.hear()

    def hear(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.stream.readline())
        return answer

    def leave(self) -> None:
        self.stream.close()
        self.connection.close()


@pytest.fixture
def guest(manifest: Manifest) -> Iterator[Guest]:
    opened = Guest(manifest)
    yield opened
    opened.leave()


def start_engine(
    guest: Guest, name: str, *sizes: int, backend: str = "gloo", device: str = "cpu"
) -> subprocess.Popen[str]:
    words = [guest.store, name, ",".join(map(str, sizes)), backend, device]
    return subprocess.Popen([sys.executable, "-c", _ENGINE, *words], stdout=subprocess.PIPE, text=True)


def test_an_engine_receives_the_bytes_in_the_order_asked_for(guest: Guest) -> None:
    wanted = [("a",), ("c", "b")]
    engine = start_engine(guest, "g1", *(len(raw(*names)) for names in wanted))
    assert engine.stdout is not None
    assert guest.say(op="join", group="g1", world=2) == {"ready": True}
    assert guest.hear() == {"done": True}
    assert engine.stdout.readline() == "joined\n"
    for names in wanted:
        assert guest.say(op="send", names=names) == {"ready": True}
        assert guest.hear() == {"done": True}
        assert engine.stdout.readline().strip() == hashlib.sha256(raw(*names)).hexdigest()
    assert engine.wait(60) == 0
    engine.stdout.close()


def test_sums_are_of_bytes_one_after_the_other(guest: Guest) -> None:
    found = guest.say(op="sums", members=[["a"], ["b", "c"]])["sums"]
    assert found == [hashlib.sha256(raw("a")).hexdigest(), hashlib.sha256(raw("b", "c")).hexdigest()]


def test_who_has_not_the_key_of_the_current_version_gets_nothing(writer: CollectiveWriter, guest: Guest) -> None:
    assert "not offered" in guest.say(key="guessed", op="sums", members=[["a"]])["error"]
    writer.write(2, 0, iter(WEIGHTS.items()))
    assert "not offered" in guest.say(op="sums", members=[["a"]])["error"]


def test_what_makes_no_sense_is_answered_and_the_door_stays_open(guest: Guest) -> None:
    assert "KeyError" in guest.say(op="send", names=["nobody"])["error"]
    assert guest.say(op="send", names=["a"]) == {"ready": True}
    assert "join a group first" in guest.hear()["error"]
    assert len(guest.say(op="sums", members=[["a"]])["sums"]) == 1


def test_an_engine_that_is_lost_is_an_error_and_costs_others_nothing(manifest: Manifest, guest: Guest) -> None:
    engine = start_engine(guest, "g2", 12000, 12000)
    assert engine.stdout is not None
    guest.say(op="join", group="g2", world=2)
    assert guest.hear() == {"done": True}
    assert engine.stdout.readline() == "joined\n"
    engine.kill()
    engine.wait()
    guest.say(op="send", names=["a"])
    guest.hear()  # its first bytes may still fit into the socket
    guest.say(op="send", names=["a"])
    assert "RuntimeError" in guest.hear()["error"]
    other = Guest(manifest)
    assert len(other.say(op="sums", members=[["a"]])["sums"]) == 1
    other.leave()
    engine.stdout.close()


def test_an_engine_that_never_comes_to_its_group_holds_up_nobody(
    writer: CollectiveWriter, manifest: Manifest, guest: Guest
) -> None:
    """Rank 0 waits for it at the store for a minute; the next version is published and read meanwhile."""
    assert guest.say(op="join", group="nobody", world=2) == {"ready": True}
    began = time.monotonic()
    newer = writer.write(2, 0, iter(WEIGHTS.items()))
    with make_reader(newer) as reader:
        for entry in newer.tensors:
            target = torch.empty(entry.shape, dtype=WEIGHTS[entry.name].dtype)
            reader.read_into(entry, target)
            assert torch.equal(target, WEIGHTS[entry.name])
    other = Guest(newer)
    engine = start_engine(other, "g4", len(raw("a")))
    assert other.say(op="join", group="g4", world=2) == {"ready": True}
    assert other.hear() == {"done": True}
    assert time.monotonic() - began < CALL_TIMEOUT / 2
    engine.kill()
    engine.communicate()
    other.leave()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a GPU for each member")
def test_from_gpu_to_gpu() -> None:
    gpu = torch.device("cuda", 0)
    groups = NcclGroups(gpu, timeout=60.0)
    writer = NcclWriter(host="127.0.0.1", bucket_bytes=8192, groups=groups, device=gpu)
    guest = Guest(writer.write(1, 0, iter(WEIGHTS.items())))
    engine = start_engine(guest, "g3", len(raw("a")), len(raw("c", "b")), backend="nccl", device="cuda:1")
    assert engine.stdout is not None
    guest.say(op="join", group="g3", world=2)
    assert guest.hear() == {"done": True}
    assert engine.stdout.readline() == "joined\n"
    for names in (("a",), ("c", "b")):
        assert guest.say(op="send", names=names) == {"ready": True}
        assert guest.hear() == {"done": True}
        assert engine.stdout.readline().strip() == hashlib.sha256(raw(*names)).hexdigest()
    assert engine.wait(60) == 0
    engine.stdout.close()
    guest.leave()
    writer.close()
