"""Hugging Face checkpoints that a run has written: found, checked and copied."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from areal_like.config.paths import RunPaths
from areal_like.errors import ConfigError
from launcher.model_files import inspect_model

_NAME = re.compile(r"version-(\d+)")


def list_checkpoints(run_folder: Path) -> dict[int, Path]:
    """The checkpoints of a run by version, oldest first."""
    folder = RunPaths(root=run_folder).checkpoints
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def newest_checkpoint(run_folder: Path) -> Path:
    """Raises: ConfigError: the run has none."""
    found = list_checkpoints(run_folder)
    if not found:
        raise ConfigError(
            f"{run_folder}: has no checkpoints; expected {RunPaths(root=run_folder).checkpoint(0).parent}/version-..."
        )
    return list(found.values())[-1]


def checkpoint_of(run_folder: Path, version: int) -> Path:
    """Raises: ConfigError: the run has none of that version; names those it has."""
    found = list_checkpoints(run_folder)
    if version not in found:
        known = ", ".join(map(str, found)) or "none"
        raise ConfigError(f"{run_folder}: has no checkpoint of version {version}; it has {known}")
    return found[version]


def check_target(target: Path) -> None:
    """Raises: ConfigError: ``target`` holds something that writing there would destroy."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: exists and is not an empty folder; choose another target")


def copy_checkpoint(source: Path, target: Path) -> int:
    """Copy a checked checkpoint so that ``target`` appears at once and whole; returns its bytes.

    Raises:
        ConfigError: the checkpoint is incomplete, ``target`` holds something, or it cannot be written.
    """
    inspect_model(source)
    check_target(target)
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, aside)
        if target.is_dir():
            target.rmdir()
        aside.rename(target)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise ConfigError(f"{target}: cannot be written: {error}") from None
    return sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
