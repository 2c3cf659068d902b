"""A door beside the collective transport, for engines that receive weights by a process group of their own making.

    engine's control            door (a thread of the trainer per control)         engine
    join {group, world} ------> rank 0 of the group, over the writer's store <---- told to join it
    sums {members} -----------> SHA-256 of tensors' bytes
    send {names} -------------> one flat broadcast of those tensors -------------> told to receive it
    lost {server} ------------> whoever waits for that server is told (weights.losses)

Every message is a line of JSON and carries the offer's key, which came with the manifest; every answer is one as well.
``join`` and ``send`` answer twice: at once, when the engine may be told, and when it is done. The group lives as long
as the connection, and has one engine in it: an engine that is lost costs the others nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from areal_like.api.weights import TensorEntry
from areal_like.weights.buckets import Piece, plan_buckets
from areal_like.weights.chunks import Chunk

#: seconds that one collective call may take: an engine that hangs is as good as lost
CALL_TIMEOUT = 60.0
#: bytes of the longest line
_LONGEST = 4 * 2**20


class Shelf:
    """One version's tensors, packed in buckets as its readers expect them."""

    def __init__(self, key: str, buckets: Sequence[torch.Tensor], pieces: Mapping[str, tuple[Piece, ...]]) -> None:
        """``buckets``: uint8, on any device; ``pieces``: where in them each tensor lies, by its name."""
        self.key = key
        self._buckets = buckets
        self._pieces = pieces

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        """The tensor's bytes, in order. Raises KeyError for a name that is not there."""
        for piece in self._pieces[name]:
            yield self._buckets[piece.bucket][piece.offset : piece.offset + piece.nbytes]

    def flat(self, names: Sequence[str]) -> torch.Tensor:
        """The bytes of several tensors, one after the other: uint8 [n]."""
        return torch.cat([part for name in names for part in self.parts(name)])


def split_pieces(entries: Sequence[TensorEntry], bucket_bytes: int) -> Mapping[str, tuple[Piece, ...]]:
    """Of tensors in equal buckets, laid out by :func:`plan_buckets`."""
    plan = plan_buckets([entry.nbytes for entry in entries], bucket_bytes)
    return {entry.name: pieces for entry, pieces in zip(entries, plan, strict=True)}


def packed_pieces(entries: Sequence[TensorEntry], chunks: Sequence[Chunk]) -> Mapping[str, tuple[Piece, ...]]:
    """Of tensors in chunks (``weights.chunks``): each is one piece."""
    return {
        entry.name: (Piece(bucket=number, offset=offset, tensor_offset=0, nbytes=entry.nbytes),)
        for number, chunk in enumerate(chunks)
        for entry, offset in zip(entries[chunk.first : chunk.last], chunk.offsets, strict=True)
    }


class Door:
    """Listens on the trainer's side for as long as its process lives."""

    def __init__(
        self,
        *,
        host: str,
        store: Store,
        backend: str,
        device: torch.device,
        on_lost: Callable[[str], None] = lambda server: None,
    ) -> None:
        """``store``: where ``backend`` groups meet; the engine reaches it under the writer's address. Each guest gets
        a connection to it of its own, since whoever waits at one holds up everybody else there.

        ``on_lost``: called with the name of a server that was lost, on a thread of the door's.
        """
        self._on_lost = on_lost
        self._host, self._store, self._backend, self._device = host, store, backend, device
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._shelf: Shelf | None = None
        threading.Thread(target=self._listen, name="weights-door", daemon=True).start()

    def show(self, shelf: Shelf) -> None:
        """From now on this version is what is sent."""
        self._shelf = shelf

    def close(self) -> None:
        """Nobody else is let in; groups end with their connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._attend, args=(connection,), name="weights-guest", daemon=True).start()

    def _attend(self, connection: socket.socket) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        store = self._store.clone()  # type: ignore[attr-defined]
        guest = _Guest(store, self._backend, self._device, self._host)
        with connection, connection.makefile("rwb") as stream, suppress(OSError, ValueError):
            while line := stream.readline(_LONGEST):
                self._serve(guest, json.loads(line), cast(BinaryIO, stream))

    def _serve(self, guest: _Guest, asked: Mapping[str, Any], stream: BinaryIO) -> None:
        shelf = self._shelf
        if shelf is None or not hmac.compare_digest(str(asked.get("key", "")), shelf.key):
            _say(stream, error="that version is not offered (any more); ask for the current one")
            return
        try:
            if asked["op"] == "sums":
                _say(stream, sums=[_sum(shelf, names) for names in asked["members"]])
                return
            if asked["op"] == "lost":
                self._on_lost(str(asked["server"]))
                _say(stream, done=True)
                return
            flat = shelf.flat(asked["names"]) if asked["op"] == "send" else None
            _say(stream, ready=True)
            if flat is None:
                guest.join(str(asked["group"]), int(asked["world"]))
            else:
                guest.send(flat)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            _say(stream, error=f"{type(error).__name__}: {error}")
            return
        _say(stream, done=True)


class _Guest:
    """The group shared with one engine."""

    def __init__(self, store: Store, backend: str, device: torch.device, host: str) -> None:
        self._store, self._backend, self._device, self._host = store, backend, device, host
        self._group: Any = None

    def join(self, name: str, world: int) -> None:
        """Rank 0 of group ``name``; returns when all are there, or raises RuntimeError in time.

        Keys lie where ``init_process_group`` and the engine's copy of it look: by name, by name again, by device.
        """
        kind = "cuda" if self._backend == "nccl" else "cpu"
        keys = PrefixStore(f"{kind}/", PrefixStore(f"{name}/", PrefixStore(name, self._store)))
        timeout = timedelta(seconds=CALL_TIMEOUT)
        if self._backend == "nccl":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            self._group = dist.ProcessGroupNCCL(keys, 0, world, nccl)
            return
        gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        gloo._timeout = timeout
        self._group = dist.ProcessGroupGloo(keys, 0, world, gloo)

    def send(self, flat: torch.Tensor) -> None:
        """Broadcast; returns when it left."""
        if self._group is None:
            raise RuntimeError("join a group first")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([flat.to(self._device)], options).wait()
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()


def _sum(shelf: Shelf, names: Sequence[str]) -> str:
    state = hashlib.sha256()
    for name in names:
        for part in shelf.parts(name):
            state.update(part.cpu().numpy().data)
    return state.hexdigest()


def _say(stream: BinaryIO, **answer: Any) -> None:
    stream.write(json.dumps(answer).encode() + b"\n")
    stream.flush()
