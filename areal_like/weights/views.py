"""A published version as a plain folder of safetensors files, for engines that load from folders. Torch-free.

    disk: the snapshot itself; where tensors of equal content lie there once, a folder of links and one file beside it
    shm:  a folder in shared memory, copied out of the segment

Every byte is verified against the manifest on the way, so that what an engine reads later is what was published.
Blocking: run it in a thread (reading and hashing release the interpreter's lock).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from areal_like.api.weights import Manifest, TensorEntry, TransportKind
from areal_like.errors import WeightUpdateError
from areal_like.weights.buckets import Piece
from areal_like.weights.checkpoint import CHUNK_BYTES, Bytes, StoredTensor, read_headers, verified, write_file
from areal_like.weights.segment_layout import (
    HEADER_SIZE,
    SegmentHeader,
    content_key,
    file_position,
    plan_pieces,
)
from areal_like.weights.segments import open_segment, read_at, remove_segment, segment_path

#: the disk transport's index: tensor -> file and name there
_INDEX = "index.json"
_PLAIN = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderView:
    """``folder`` holds the version; ``content`` reads a tensor's bytes. ``ours``: it was made here, for one reader."""

    folder: Path
    content: Bytes
    ours: bool

    def remove(self) -> None:
        """Free what was made here; the version itself belongs to the trainer."""
        if self.ours:
            shutil.rmtree(self.folder, ignore_errors=True)


def open_view(manifest: Manifest, reader: str) -> FolderView:
    """Lay a version out for ``reader`` (a server's name: each has a view of its own).

    Raises:
        WeightUpdateError: the version is gone, was overwritten, is damaged, or lies where no folder can be made of it.
    """
    label = _PLAIN.sub("_", reader)
    try:
        if manifest.transport is TransportKind.DISK:
            return _of_snapshot(manifest, label)
        if manifest.transport is TransportKind.SHM:
            return _of_segment(manifest, label)
    except (OSError, ValueError, EOFError) as error:
        raise WeightUpdateError(f"version {manifest.version}: {manifest.location}: {error}") from error
    raise WeightUpdateError(f"version {manifest.version}: transport {manifest.transport!r} has no folder")


# -- disk --


def _of_snapshot(manifest: Manifest, label: str) -> FolderView:
    snapshot = Path(manifest.location)
    index: dict[str, list[str]] = json.loads((snapshot / _INDEX).read_text(encoding="utf-8"))
    stored = read_headers(snapshot)
    places = {entry.name: _place(entry, index, stored, snapshot) for entry in manifest.tensors}

    def content(entry: TensorEntry) -> Iterator[memoryview]:
        return places[entry.name].chunks()

    for entry in manifest.tensors:
        for _ in verified(entry, content):
            pass
    aliases = [entry for entry in manifest.tensors if entry.name not in stored]
    if not aliases and stored.keys() == places.keys():
        return FolderView(folder=snapshot, content=content, ours=False)
    folder = snapshot / f"view-{label}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    for file in sorted({place.file for place in places.values()}):
        (folder / file.name).symlink_to(file)
    if aliases:
        write_file(folder / "aliases.safetensors", aliases, content)
    return FolderView(folder=folder, content=content, ours=True)


def _place(
    entry: TensorEntry, index: Mapping[str, list[str]], stored: Mapping[str, StoredTensor], snapshot: Path
) -> StoredTensor:
    """Where a tensor lies; its dtype and shape there are those of the manifest."""
    name = index.get(entry.name, ["", entry.name])[1]
    place = stored.get(name)
    if place is None:
        raise WeightUpdateError(f"tensor {entry.name!r} is not in {snapshot}")
    if (place.dtype, place.shape) != (entry.dtype, entry.shape):
        raise WeightUpdateError(
            f"tensor {entry.name!r}: {place.file} holds {place.dtype} {place.shape}, the manifest says "
            f"{entry.dtype} {entry.shape}"
        )
    return place


# -- shared memory --


def _of_segment(manifest: Manifest, label: str) -> FolderView:
    name = f"{manifest.location}.view-{label}"
    folder = segment_path(name)
    remove_segment(name)
    folder.mkdir(mode=0o700)
    try:
        segment = open_segment(manifest.location)
        try:
            header = _header(segment, manifest)
            pieces = plan_pieces(manifest.tensors, header.bucket_bytes)

            def raw(entry: TensorEntry) -> Iterator[memoryview]:
                return _segment_chunks(segment, pieces[content_key(entry)], header.bucket_bytes)

            write_file(folder / "model.safetensors", manifest.tensors, raw)
            _header(segment, manifest)  # overwritten meanwhile? the digests say so too
        finally:
            os.close(segment)
        stored = read_headers(folder)
    except BaseException:
        with suppress(OSError):
            shutil.rmtree(folder)
        raise
    return FolderView(folder=folder, content=lambda entry: stored[entry.name].chunks(), ours=True)


def _segment_chunks(segment: int, pieces: tuple[Piece, ...], bucket_bytes: int) -> Iterator[memoryview]:
    for piece in pieces:
        done = 0
        while done < piece.nbytes:
            chunk = memoryview(bytearray(min(CHUNK_BYTES, piece.nbytes - done)))
            read_at(segment, chunk, file_position(piece, bucket_bytes) + done)
            done += len(chunk)
            yield chunk


def _header(segment: int, manifest: Manifest) -> SegmentHeader:
    data = bytearray(HEADER_SIZE)
    read_at(segment, memoryview(data), 0)
    header = SegmentHeader.unpack(bytes(data))
    found = None if header is None else (header.incarnation, header.version, header.digest)
    if header is None or found != (manifest.incarnation, manifest.version, manifest.digest):
        raise WeightUpdateError(
            f"segment {manifest.location!r} does not hold version {manifest.version} of incarnation "
            f"{manifest.incarnation} any more; ask for the current one"
        )
    return header
