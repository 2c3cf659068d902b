"""The other process of ``test_device_weights.py``: told by its arguments what to do, it prints a line per step."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator

import torch

from areal_like.api.weights import Manifest
from areal_like.errors import WeightUpdateError
from areal_like.weights.chunks import plan_chunks
from areal_like.weights.digest import tensor_digest
from areal_like.weights.nccl import Group, NcclGroups
from areal_like.weights.transports.ipc import IpcReader
from areal_like.weights.transports.nccl import NcclWriter, side_stream
from areal_like.weights.transports.seat import Membership, Seat

#: bytes of a bucket; several of them hold the weights below
BUCKET_BYTES = 8 * 2**20
STALL = 3.0


def weights(seed: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """About 60 MB of bfloat16, an odd shape and an empty one among them."""
    generator = torch.Generator(device=device).manual_seed(seed)
    for number in range(24):
        shape = (1024, 1024) if number % 4 else (333, 5 + number)
        yield f"layer.{number}", torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)
    yield "large", torch.randn(4096, 3000, generator=generator, device=device).to(torch.bfloat16)
    yield "none", torch.empty(0, 4, dtype=torch.bfloat16, device=device)


def say(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


def read_manifest() -> Manifest:
    return Manifest.model_validate_json(sys.stdin.readline())


def open_shared(versions: int) -> None:
    """Versions over CUDA IPC, each verified tensor by tensor."""
    device = torch.device("cuda", 0)
    say("ready")
    for _ in range(versions):
        manifest = read_manifest()
        with IpcReader(manifest, device) as reader:
            for entry in manifest.tensors:
                target = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=device)
                reader.read_into(entry, target)
                assert tensor_digest(target, entry.digest) == entry.digest, entry.name
        say(manifest.digest)


def receive(versions: int, *, die_after: int | None = None) -> None:
    """Versions over NCCL on the second GPU; or be killed once ``die_after`` buckets of one have come."""
    device = torch.device("cuda", 1)
    torch.cuda.set_device(device)
    membership = Membership(NcclGroups(device, timeout=60.0), device)
    say("ready")
    for _ in range(versions):
        manifest = read_manifest()
        seat = Seat(manifest, membership)
        seat.prepare()
        say("seated")

        def take(group: Group, manifest: Manifest = manifest, seat: Seat = seat) -> None:
            chunks = plan_chunks([entry.nbytes for entry in manifest.tensors], seat.bucket_bytes)
            buckets = [torch.empty(chunk.nbytes, dtype=torch.uint8, device=device) for chunk in chunks]
            with side_stream(device):
                for number, bucket in enumerate(buckets):
                    if number == die_after:
                        os.kill(os.getpid(), signal.SIGKILL)
                    group.broadcast(bucket, src=0)
            group.wait(seat.stall)
            for chunk, bucket in zip(chunks, buckets, strict=True):
                for entry, offset in zip(manifest.tensors[chunk.first : chunk.last], chunk.offsets, strict=True):
                    part = bucket[offset : offset + entry.nbytes].view(getattr(torch, entry.dtype)).view(entry.shape)
                    assert tensor_digest(part, entry.digest) == entry.digest, entry.name

        seat.receive(take)
        say(f"{membership.name} {manifest.digest}")


def endure() -> None:
    """Receive from a trainer that stops; say how long it took to be told."""
    device = torch.device("cuda", 1)
    torch.cuda.set_device(device)
    membership = Membership(NcclGroups(device, timeout=60.0), device)
    manifest = read_manifest()
    seat = Seat(manifest, membership)
    seat.prepare()
    begun = time.monotonic()

    def take(group: Group) -> None:
        with side_stream(device):
            for chunk in plan_chunks([entry.nbytes for entry in manifest.tensors], seat.bucket_bytes):
                bucket = torch.empty(chunk.nbytes, dtype=torch.uint8, device=device)
                group.broadcast(bucket, src=0)
                torch.cuda.current_stream().synchronize()  # as vLLM's consumer waits

    try:
        seat.receive(take)
    except WeightUpdateError as error:
        say(f"told {time.monotonic() - begun:.1f} {type(error).__name__}")
    assert float(torch.ones(8, device=device).sum()) == 8.0
    say("alive")


class _Stopping(NcclGroups):
    """Its communicators kill this process at their sixth broadcast."""

    def join(self, unique_id: bytes, *, rank: int, size: int):  # type: ignore[no-untyped-def]
        group = super().join(unique_id, rank=rank, size=size)
        broadcast, count = group.broadcast, [0]

        def stop(tensor: torch.Tensor, src: int, stream: torch.cuda.Stream | None = None) -> None:
            count[0] += 1
            if count[0] == 6:
                time.sleep(0.5)  # the others are in the middle of it
                os.kill(os.getpid(), signal.SIGKILL)
            broadcast(tensor, src, stream)

        group.broadcast = stop  # type: ignore[method-assign]
        return group


def train_and_die() -> None:
    """A trainer that is killed in the middle of its first version."""
    device = torch.device("cuda", 0)
    groups = _Stopping(device, timeout=60.0)
    writer = NcclWriter(host="127.0.0.1", bucket_bytes=BUCKET_BYTES, groups=groups, device=device, stall=STALL)
    say(writer.write(1, 0, weights(1, device)).model_dump_json())
    time.sleep(300)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["shared", versions]:
            open_shared(int(versions))
        case ["receive", versions]:
            receive(int(versions))
        case ["receive-and-die", after]:
            receive(1, die_after=int(after))
        case ["endure"]:
            endure()
        case ["train-and-die"]:
            train_and_die()
        case _:
            raise SystemExit(f"unknown: {sys.argv[1:]}")
