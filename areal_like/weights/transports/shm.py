"""``shm``: two shared-memory segments that take turns.

Version n of a writer goes to segment n mod 2, so a server may go on reading version n while n + 1 is written. The
channel publishes one version at a time and ejects who has not staged it, so nobody in rotation still reads the
segment that is written next; a straggler finds another version in the segment's header, or a wrong digest, and is
refused. Layout: a header page, then the buckets (``weights.buckets``). Tensors of equal content lie there once.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Self

import torch

from areal_like.api.weights import Manifest, TensorEntry, TransportKind
from areal_like.errors import WeightUpdateError
from areal_like.weights.buckets import Cursor, aligned_bucket_bytes
from areal_like.weights.host_copies import HostCopies, HostCopy, Job
from areal_like.weights.manifest import make_manifest
from areal_like.weights.segment_layout import (
    HEADER_SIZE,
    UNFINISHED,
    SegmentHeader,
    content_key,
    file_position,
    plan_pieces,
)
from areal_like.weights.segments import create_segment, open_segment, read_at, segment_name, segment_path, write_at


class ShmWriter:
    """Owns the two segments of a run; the files go when it is closed."""

    def __init__(self, run_id: str, *, bucket_bytes: int, copies: HostCopies | None = None) -> None:
        """``copies``: what takes the tensors through host memory, the writer's own; made to suit without."""
        self._copies = copies or HostCopies()
        self._bucket_bytes = aligned_bucket_bytes(bucket_bytes)
        self._names = tuple(segment_name(run_id, f"weights-{turn}") for turn in range(2))
        self._fds: list[int | None] = [None, None]
        self._written = 0

    def write(self, version: int, incarnation: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """See :meth:`WeightWriter.write`."""
        turn = self._written % 2
        try:
            manifest = self._fill(turn, version, incarnation, tensors)
        except OSError as error:
            raise WeightUpdateError(
                f"shared memory segment {self._names[turn]!r}: writing version {version} failed: {error}; "
                "free memory in /dev/shm or use weights.transport=disk"
            ) from error
        self._written += 1
        return manifest

    def _fill(self, turn: int, version: int, incarnation: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        fd = self._open(turn)
        self._seal(fd, incarnation, UNFINISHED, "")
        entries = self._copies.export(tensors, _Segment(fd, self._bucket_bytes))
        manifest = make_manifest(version, incarnation, TransportKind.SHM, self._names[turn], entries)
        self._seal(fd, incarnation, version, manifest.digest)
        return manifest

    def _open(self, turn: int) -> int:
        fd = self._fds[turn]
        if fd is None:
            fd = self._fds[turn] = create_segment(self._names[turn])
        return fd

    def _seal(self, fd: int, incarnation: int, version: int, digest: str) -> None:
        header = SegmentHeader(incarnation=incarnation, version=version, bucket_bytes=self._bucket_bytes, digest=digest)
        write_at(fd, memoryview(header.pack()), 0)

    def close(self) -> None:
        """Remove both segments. Servers that still read one keep it until they close it."""
        self._copies.close()
        for turn, fd in enumerate(self._fds):
            if fd is not None:
                os.close(fd)
                segment_path(self._names[turn]).unlink(missing_ok=True)
                self._fds[turn] = None


class _Segment:
    """The medium of one write: gives tensors their places, and has one thread at a time write.

    The file system locks a whole file for each write: a second writer would only wait, where it can hash meanwhile.
    """

    collects = False

    def __init__(self, fd: int, bucket_bytes: int) -> None:
        self._fd = fd
        self._cursor = Cursor(bucket_bytes=bucket_bytes)
        self._placed: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._unwritten: deque[tuple[HostCopy, int]] = deque()
        self._writing = False

    def place(self, copy: HostCopy, entry: TensorEntry) -> tuple[Job, ...]:
        """See :meth:`Medium.place`."""
        known = content_key(entry) in self._placed
        self._placed.add(content_key(entry))
        if known or not entry.nbytes:
            copy.release()
            return ()
        pieces, self._cursor = self._cursor.place(entry.nbytes)
        position = file_position(pieces[0], self._cursor.bucket_bytes)  # buckets follow each other without a gap
        with self._lock:
            self._unwritten.append((copy, position))
            begin, self._writing = not self._writing, True
        return (self._write,) if begin else ()

    def finish(self) -> tuple[Job, ...]:
        """See :meth:`Medium.finish`."""
        return ()

    def _write(self) -> None:
        while True:
            with self._lock:
                if not self._unwritten:
                    self._writing = False
                    return
                copy, position = self._unwritten.popleft()
            for part in copy.parts:
                write_at(self._fd, part.data, position + part.start)
                part.release()


class ShmReader:
    """Reads one version out of a segment, in any number of threads; refuses once the segment holds another."""

    device = torch.device("cpu")
    concurrent = True

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        try:
            self._fd = open_segment(manifest.location)
        except (OSError, ValueError) as error:
            raise WeightUpdateError(
                f"version {manifest.version}: segment {manifest.location!r} cannot be opened: {error}; "
                "shm works on one host and while the trainer lives"
            ) from error
        try:
            self._pieces = plan_pieces(manifest.tensors, self._check().bucket_bytes)
        except BaseException:
            os.close(self._fd)
            raise

    def read_into(self, entry: TensorEntry, target: torch.Tensor) -> None:
        """See :meth:`WeightReader.read_into`."""
        buffer = target.reshape(-1).view(torch.uint8).numpy().data
        header = self._check()
        try:
            for piece in self._pieces[content_key(entry)]:
                part = buffer[piece.tensor_offset : piece.tensor_offset + piece.nbytes]
                read_at(self._fd, part, file_position(piece, header.bucket_bytes))
        except (OSError, EOFError) as error:
            raise WeightUpdateError(f"tensor {entry.name!r}: segment {self._manifest.location!r}: {error}") from error
        self._check()  # overwritten meanwhile? then what was read is a mixture

    def _check(self) -> SegmentHeader:
        data = bytearray(HEADER_SIZE)
        try:
            read_at(self._fd, memoryview(data), 0)
        except (OSError, EOFError) as error:
            raise WeightUpdateError(f"segment {self._manifest.location!r} has no header: {error}") from error
        wanted = self._manifest
        header = SegmentHeader.unpack(bytes(data))
        if header is None:
            raise WeightUpdateError(f"segment {wanted.location!r} holds no weights of ours")
        found = (header.incarnation, header.version, header.digest)
        if found != (wanted.incarnation, wanted.version, wanted.digest):
            raise WeightUpdateError(
                f"segment {wanted.location!r} no longer holds version {wanted.version} of incarnation "
                f"{wanted.incarnation}: now version {header.version} of {header.incarnation}; ask for the current one"
            )
        return header

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
