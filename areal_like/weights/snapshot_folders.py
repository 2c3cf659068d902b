"""Folders that the ``disk`` transport writes, one per version: their names, and how they go. Torch-free."""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path

_ASIDE = ".writing-"
#: what the transport made, finished or not; nothing else is ever removed
_SNAPSHOT = re.compile(rf"({re.escape(_ASIDE)})?v\d{{8,}}-i\d+")


def snapshot_folder(directory: Path, version: int, incarnation: int) -> Path:
    """Where a version lies once it is whole."""
    return directory / f"v{version:08d}-i{incarnation}"


def aside_of(folder: Path) -> Path:
    """Where a version lies while it is written."""
    return folder.with_name(f"{_ASIDE}{folder.name}")


def list_snapshots(directory: Path) -> set[Path]:
    """Every version there, finished or not; empty where there is no such directory."""
    return {path for path in directory.iterdir() if _SNAPSHOT.fullmatch(path.name)} if directory.is_dir() else set()


def remove_snapshots(directory: Path) -> None:
    """Remove every version, and the directory if nothing else is in it. What cannot be removed stays.

    Through a link nothing is removed: where it leads, there may be versions of another run.
    """
    if directory.is_symlink():
        return
    for path in list_snapshots(directory):
        shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        directory.rmdir()
