"""What a run must not leave behind on the machine: shared memory and sockets."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from pathlib import Path

from areal_like.weights.segments import remove_segments

#: a Unix socket's whole path must fit into 107 bytes; this much is left for the folder
_LONGEST_SOCKET_FOLDER = 70


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
    for base in {tempfile.gettempdir(), "/tmp"}:
        for folder in Path(base).glob(f"{_socket_prefix(run_id)}*"):
            shutil.rmtree(folder, ignore_errors=True)
    remove_segments(run_id)


def _socket_prefix(run_id: str) -> str:
    return f"areal-like-{run_id}-"
