"""Named shared-memory segments: files of mode 0600 in memory, found and removed by the run's id. Torch-free.

Python's ``multiprocessing.shared_memory`` is not used: its resource tracker removes segments that another process
still reads, and its names do not tell whose they are.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

PREFIX = "areal-like"
_RUN_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_SEGMENT = re.compile(rf"{PREFIX}-[A-Za-z0-9_.+-]{{1,200}}")


def segment_directory() -> Path:
    """Linux's memory file system; elsewhere the temporary directory."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


def segment_name(run_id: str, label: str) -> str:
    """The name of segment ``label`` of a run.

    Raises:
        ValueError: ``run_id`` has characters that do not belong in a file name.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise ValueError(f"run id {run_id!r} must be 1 to 128 letters, digits, '_', '.' or '-'")
    return f"{PREFIX}-{run_id}+{label}"  # "+" cannot be part of a run id: no run lists another's


def segment_path(name: str) -> Path:
    """Where segment ``name`` lies.

    Raises:
        ValueError: ``name`` is not one of ours; it may have come over a socket and must not lead elsewhere.
    """
    if not _SEGMENT.fullmatch(name):
        raise ValueError(f"{name!r} is not a segment name; it must be a bare name starting with {PREFIX!r}")
    return segment_directory() / name


def list_segments(run_id: str) -> tuple[str, ...]:
    """Names of the segments that a run has now, sorted; empty after a clean end."""
    start = segment_name(run_id, "")
    return tuple(sorted(name for name in os.listdir(segment_directory()) if name.startswith(start)))


def remove_segments(run_id: str) -> tuple[str, ...]:
    """Remove every segment of a run (after its processes have ended) and return their names."""
    names = list_segments(run_id)
    for name in names:
        remove_segment(name)
    return names


def remove_segment(name: str) -> None:
    """Remove one segment, be it a file or a folder of files; nothing happens where it is gone."""
    path = segment_path(name)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def create_segment(name: str) -> int:
    """Create (replacing a leftover of the same name) and return a descriptor open for reading and writing.

    A process that still reads the leftover keeps its own copy until it closes it.
    """
    path = segment_path(name)
    path.unlink(missing_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def open_segment(name: str) -> int:
    """Descriptor of an existing segment, for reading.

    Raises:
        FileNotFoundError: it was removed, or the writer runs on another host.
        PermissionError: it belongs to another user.
    """
    fd = os.open(segment_path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if os.fstat(fd).st_uid != os.geteuid():
        os.close(fd)
        raise PermissionError(f"segment {name!r} belongs to another user; refusing to load weights from it")
    return fd


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``, growing the segment; a full memory raises OSError instead of a signal."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def read_at(fd: int, buffer: memoryview, offset: int) -> None:
    """Fill ``buffer`` from ``offset``.

    Raises:
        EOFError: the segment ends before.
    """
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            raise EOFError(f"ends at byte {offset + done}, {len(buffer) - done} bytes too early")
        done += count
