"""``collective`` over gloo: packed buckets broadcast through host memory, from the trainer to every server that asks.

Between GPUs it is another: ``weights.transports.nccl``.

    writer: pack --> offer --> round 0 --> round 1 ...      (one thread; the trainer goes on)
    reader: join a round --> group of the trainer and all who joined --> bucket after bucket

A *round* is one broadcast of one version. It closes when as many readers joined as did for the version before, or a
while after the first: whoever comes later, or was in a group that broke, takes part in the next round. So a group is
rebuilt without a server that was lost, which costs the others a moment and not the version. Nothing is paused then.

The meeting place is a TCPStore of the trainer, bound to the address that the manifest names; its keys start with a
secret that travels with the manifest, over an authenticated connection. Buckets are raw bytes; nothing is unpickled.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from areal_like.api.weights import Manifest, TensorEntry, TransportKind
from areal_like.errors import WeightUpdateError
from areal_like.weights.buckets import Cursor, Piece, aligned_bucket_bytes, plan_buckets
from areal_like.weights.digest import byte_chunks, tensor_entry
from areal_like.weights.manifest import make_manifest
from areal_like.weights.transports.door import Door, Shelf, split_pieces
from areal_like.weights.transports.meeting import Meeting, open_store, reach_store

_BACKEND = "gloo"
#: seconds after the first reader of a round until it closes without those that were expected
JOIN_WINDOW = 3.0
#: seconds that one collective call may take: a member that hangs is as good as lost
CALL_TIMEOUT = 30.0
#: seconds a reader waits for the trainer to take notice of it
PATIENCE = 120.0
#: seconds between two looks at the store, where it can only be asked
_LOOK = 0.02
#: broken groups that a reader leaves behind before it gives up
_MOST_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """One version, packed and waiting for readers."""

    key: str
    buckets: Sequence[torch.Tensor]


class CollectiveWriter:
    """The trainer's end (rank 0): keeps a packed copy of the current version and serves rounds of it in a thread."""

    def __init__(self, *, host: str, bucket_bytes: int) -> None:
        """``host``: address of this machine that the servers can reach; the store listens on it alone."""
        self._bucket_bytes = aligned_bucket_bytes(bucket_bytes)
        self._host = host
        self._store, self._port = open_store(host)
        # a connection of the sender's own: whoever waits at one holds up everybody else there
        self._rounds: Store = self._store.clone()  # type: ignore[attr-defined]
        self._door = Door(host=host, store=self._store, backend=_BACKEND, device=torch.device("cpu"))
        self._changed = threading.Condition()
        self._offer: _Offer | None = None
        self._closed = False
        self._expected = 1
        self._thread = threading.Thread(target=self._serve, name="weights-sender", daemon=True)
        self._thread.start()

    def write(self, version: int, incarnation: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """See :meth:`WeightWriter.write`. The version before is no longer offered, once its round is over."""
        packer = _Packer(self._bucket_bytes)
        entries = [packer.add(name, tensor) for name, tensor in tensors]
        offer = _Offer(key=f"{secrets.token_hex(16)}.v{version}.i{incarnation}", buckets=packer.buckets)
        with self._changed:
            if self._offer is not None:
                self._store.set(f"{self._offer.key}/over", "1")
            self._offer = offer
            self._changed.notify()
        self._door.show(Shelf(offer.key, packer.buckets, split_pieces(entries, self._bucket_bytes)))
        meeting = Meeting(
            host=self._host, port=self._port, key=offer.key, bucket_bytes=self._bucket_bytes, backend=_BACKEND,
            door=self._door.port,
        )  # fmt: skip
        return make_manifest(version, incarnation, TransportKind.COLLECTIVE, meeting.location(), entries)

    def close(self) -> None:
        """Stop offering. The threads are daemons: a collective call that hangs cannot be woken."""
        self._door.close()
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._offer is not None)
                if self._closed:
                    return
                offer = self._offer
            if offer is not None:
                self._serve_offer(offer)

    def _serve_offer(self, offer: _Offer) -> None:
        """Rounds of one version, until there is another."""
        served, number = 0, 0
        while not self._closed and self._offer is offer:
            joined = self._close_round(offer, number, wanted=max(self._expected - served, 1))
            if joined:
                with suppress(RuntimeError):  # somebody was lost: the others meet again in the next round
                    self._send(offer, f"{offer.key}/{number}", joined + 1)
                    served += joined
                number += 1
        self._expected = max(served, 1)

    def _send(self, offer: _Offer, prefix: str, size: int) -> None:
        """Every bucket to a group, which ends with this call: its sockets close, and whoever still waits notices."""
        group = _group(self._rounds, prefix, 0, size, self._host)
        for bucket in offer.buckets:
            _broadcast(group, bucket)

    def _close_round(self, offer: _Offer, number: int, *, wanted: int) -> int:
        """Wait for the readers of a round and tell them how many they are; 0 when the offer is over."""
        prefix, first = f"{offer.key}/{number}", 0.0
        while not self._closed and self._offer is offer:
            joined: int = self._rounds.add(f"{prefix}/joined", 0)
            now = time.monotonic()
            first = first or (now if joined else 0.0)
            if joined and (joined >= wanted or now - first > JOIN_WINDOW):
                self._rounds.set(f"{prefix}/members", str(joined))
                return joined
            time.sleep(_LOOK)
        return 0


class CollectiveReader:
    """A server's end for one version. Buckets arrive in order, so tensors must be asked for in the manifest's order."""

    device = torch.device("cpu")
    concurrent = False

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._meeting = meeting = Meeting.parse(manifest.location)
        plan = plan_buckets([entry.nbytes for entry in manifest.tensors], meeting.bucket_bytes)
        self._pieces = {entry.name: pieces for entry, pieces in zip(manifest.tensors, plan, strict=True)}
        self._count = 1 + max((piece.bucket for pieces in plan for piece in pieces), default=-1)
        self._store = reach_store(meeting, f"version {manifest.version}", timeout=CALL_TIMEOUT)
        self._stream = self._buckets()
        self._bucket = torch.empty(0, dtype=torch.uint8)
        self._number = -1

    def read_into(self, entry: TensorEntry, target: torch.Tensor) -> None:
        """See :meth:`WeightReader.read_into`."""
        buffer = target.reshape(-1).view(torch.uint8)
        for piece in self._pieces[entry.name]:
            bucket = self._until(piece.bucket)
            buffer[piece.tensor_offset : piece.tensor_offset + piece.nbytes] = bucket[
                piece.offset : piece.offset + piece.nbytes
            ]

    def _until(self, number: int) -> torch.Tensor:
        if number < self._number:
            raise WeightUpdateError(f"bucket {number} was asked for after bucket {self._number}: keep the order")
        while self._number < number:
            self._bucket = next(self._stream)
            self._number += 1
        return self._bucket

    def _buckets(self) -> Iterator[torch.Tensor]:
        """Every bucket once, in order, over as many rounds as it takes."""
        done, number, trouble = 0, 0, ""
        for _ in range(_MOST_ROUNDS):
            number, rank, size = self._join(number)
            try:
                for place, bucket in enumerate(self._receive(f"{self._meeting.key}/{number}", rank, size)):
                    if place >= done:
                        done += 1
                        yield bucket
                return
            except RuntimeError as error:
                trouble = str(error)
            number += 1
        raise WeightUpdateError(
            f"version {self._manifest.version}: {_MOST_ROUNDS} groups broke, the last one with: {trouble}"
        )

    def _receive(self, prefix: str, rank: int, size: int) -> Iterator[torch.Tensor]:
        """One round's buckets, in host memory. Its group ends with the iterator.

        Raises:
            RuntimeError: a member was lost.
        """
        group = _group(self._store, prefix, rank, size, self._own_host())
        for _ in range(self._count):
            bucket = torch.empty(self._meeting.bucket_bytes, dtype=torch.uint8)
            _broadcast(group, bucket)
            yield bucket

    def _join(self, number: int) -> tuple[int, int, int]:
        """(round, own rank, group size) of the first round from ``number`` on that takes us."""
        deadline = time.monotonic() + PATIENCE
        while True:
            prefix = f"{self._meeting.key}/{number}"
            try:
                place = self._store.add(f"{prefix}/joined", 1)
                members = self._members(prefix, deadline)
            except RuntimeError as error:
                raise WeightUpdateError(f"version {self._manifest.version}: the trainer is gone: {error}") from error
            if place <= members:
                return number, place, members + 1
            number += 1

    def _members(self, prefix: str, deadline: float) -> int:
        while not self._store.check([f"{prefix}/members"]):
            if self._store.check([f"{self._meeting.key}/over"]):
                raise WeightUpdateError(
                    f"version {self._manifest.version} is no longer offered; ask for the current one"
                )
            if time.monotonic() > deadline:
                raise WeightUpdateError(f"version {self._manifest.version}: the trainer sent nothing in {PATIENCE:g} s")
            time.sleep(_LOOK)
        return int(self._store.get(f"{prefix}/members"))

    def _own_host(self) -> str:
        """Where we listen: on loopback if the trainer does."""
        loopback = self._meeting.host.startswith("127.") or self._meeting.host in ("localhost", "::1")
        return self._meeting.host if loopback else socket.gethostname()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take what is left of the round: the others are in the same group."""
        if kind is None and self._number >= 0:
            for _ in self._stream:
                pass
        self._stream.close()  # type: ignore[attr-defined]  # a generator


class _Packer:
    """Tensors one after the other into buckets of host memory."""

    def __init__(self, bucket_bytes: int) -> None:
        self._cursor = Cursor(bucket_bytes=bucket_bytes)
        self.buckets: list[torch.Tensor] = []

    def add(self, name: str, tensor: torch.Tensor) -> TensorEntry:
        entry = tensor_entry(name, tensor)
        pieces, self._cursor = self._cursor.place(entry.nbytes)
        while pieces and len(self.buckets) <= pieces[-1].bucket:
            self.buckets.append(torch.zeros(self._cursor.bucket_bytes, dtype=torch.uint8))
        start = 0
        for chunk in byte_chunks(tensor):
            self._put(pieces, start, torch.frombuffer(chunk, dtype=torch.uint8))
            start += len(chunk)
        return entry

    def _put(self, pieces: Sequence[Piece], start: int, chunk: torch.Tensor) -> None:
        end = start + chunk.numel()
        for piece in pieces:
            first, last = max(start, piece.tensor_offset), min(end, piece.tensor_offset + piece.nbytes)
            if first < last:
                at = piece.offset + first - piece.tensor_offset
                self.buckets[piece.bucket][at : at + last - first] = chunk[first - start : last - start]


def _group(store: Store, prefix: str, rank: int, size: int, host: str) -> Any:
    """A process group of its own, apart from any that this process is in."""
    keys = PrefixStore(f"{prefix}/group", store)
    timeout = timedelta(seconds=CALL_TIMEOUT)
    gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    gloo._timeout = timeout
    return dist.ProcessGroupGloo(keys, rank, size, gloo)


def _broadcast(group: Any, bucket: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([bucket], options).wait()
