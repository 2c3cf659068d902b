"""What a run must not leave behind on the machine: shared memory and sockets."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from areal_like.weights.segments import list_segments, remove_segments, segment_directory, segment_path

#: a Unix socket's whole path must fit into 107 bytes; this much is left for the folder
_LONGEST_SOCKET_FOLDER = 70
#: what Python's multiprocessing calls its blocks and semaphores, and SGLang the board of its load
_ENGINE_MEMORY = ("psm_*", "sem.mp-*", "sglang_loads_*")


def new_run_id() -> str:
    """A name for one launch, unique on this machine: 8 hex digits."""
    return secrets.token_hex(4)


def make_socket_folder(run_id: str) -> Path:
    """A folder of mode 0700 for the run's ``ipc://`` sockets, short enough for their names."""
    prefix = _socket_prefix(run_id)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    if len(str(folder)) > _LONGEST_SOCKET_FOLDER and Path("/tmp").is_dir():
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    return folder


def sweep(run_id: str) -> None:
    """Remove the sockets and shared memory of a run whose processes have ended."""
    for folder in _socket_folders(run_id):
        shutil.rmtree(folder, ignore_errors=True)
    remove_segments(run_id)


def left_behind(run_id: str) -> tuple[Path, ...]:
    """What :func:`sweep` would remove: files and folders."""
    return (*_socket_folders(run_id), *(segment_path(name) for name in list_segments(run_id)))


def size_of(path: Path) -> int:
    """Bytes that a file takes, or the files in a folder; 0 for what is gone meanwhile."""
    total = 0
    for found in path.rglob("*") if path.is_dir() else (path,):
        with contextlib.suppress(OSError):
            total += found.lstat().st_blocks * 512
    return total


def _socket_folders(run_id: str) -> list[Path]:
    bases = {tempfile.gettempdir(), "/tmp"}
    return sorted(folder for base in bases for folder in Path(base).glob(f"{_socket_prefix(run_id)}*"))


def sweep_engine_memory(since: float) -> None:
    """Remove Python's shared memory and semaphores made after ``since`` (seconds of the epoch) that nobody maps.

    An engine that is killed leaves them: its resource tracker dies with it.
    """
    found = [path for pattern in _ENGINE_MEMORY for path in segment_directory().glob(pattern)]
    made = {path: inode for path in found if (inode := _inode_made_after(path, since)) is not None}
    mapped = _mapped_inodes() if made else frozenset()
    for path, inode in made.items():
        if inode not in mapped:
            path.unlink(missing_ok=True)


def _inode_made_after(path: Path, since: float) -> int | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino if status.st_uid == os.geteuid() and status.st_ctime >= since else None


def _mapped_inodes() -> frozenset[int]:
    """Files in memory that some process of ours maps (Linux). By inode: a semaphore is mapped under another name."""
    found: set[int] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text(errors="replace").splitlines()
        except OSError:  # it has ended, or belongs to another user, whose blocks are not ours
            continue
        found.update(int(line.split(maxsplit=5)[4]) for line in lines if "/dev/shm/" in line)
    return frozenset(found)


def _socket_prefix(run_id: str) -> str:
    return f"areal-like-{run_id}-"
