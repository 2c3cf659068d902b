"""What a run must not leave behind on the machine: shared memory and sockets."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
from pathlib import Path

#: where Linux shows POSIX shared memory
SHM_FOLDER = Path("/dev/shm")
#: a Unix socket's whole path must fit into 107 bytes; this much is left for the folder
_LONGEST_SOCKET_FOLDER = 70


def new_run_id() -> str:
    """A name for one launch, unique on this machine: 8 hex digits."""
    return secrets.token_hex(4)


def shm_prefix(run_id: str) -> str:
    """How the names of every shared-memory segment of a run begin."""
    return f"areal-{run_id}-"


def shared_memory_of(run_id: str) -> tuple[str, ...]:
    """Names of the segments that a run holds now."""
    if not SHM_FOLDER.is_dir():
        return ()
    return tuple(sorted(path.name for path in SHM_FOLDER.glob(f"{shm_prefix(run_id)}*")))


def sweep_shared_memory(run_id: str) -> tuple[str, ...]:
    """Unlink every segment of a run whose processes have ended; returns their names."""
    names = shared_memory_of(run_id)
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            (SHM_FOLDER / name).unlink()
    return names


def make_socket_folder(run_id: str) -> Path:
    """A folder of mode 0700 for the run's ``ipc://`` sockets, short enough for their names."""
    folder = Path(tempfile.mkdtemp(prefix=f"areal-{run_id}-"))
    if len(str(folder)) > _LONGEST_SOCKET_FOLDER and Path("/tmp").is_dir():
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=f"areal-{run_id}-", dir="/tmp"))
    return folder


def sweep_sockets(run_id: str) -> None:
    """Remove the socket folders of a run whose processes have ended."""
    for base in {tempfile.gettempdir(), "/tmp"}:
        for folder in Path(base).glob(f"areal-{run_id}-*"):
            shutil.rmtree(folder, ignore_errors=True)
