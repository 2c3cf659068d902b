"""One run, one folder: a lock against a second run in it, and a finished run is never written over."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like.config.paths import RunPaths
from areal_like.errors import ArealLikeError, ConfigError
from areal_like.observe.disk import FULL
from launcher.leftovers import sweep

#: what a lock file's run id must look like before anything is removed in its name
_RUN_ID = re.compile(r"[0-9A-Za-z-]{4,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds, or last held, a run's folder."""

    pid: int
    run_id: str


def check_run_directory(paths: RunPaths, *, force: bool) -> None:
    """Check that a run may use its folder now; leaves nothing behind.

    Raises:
        ConfigError: the folder cannot be made or written; another process runs in it; or it holds an earlier run and
            ``force`` is false.
        ArealLikeError: the disk is full.
    """
    with _told(paths):
        _check_usable(paths)
        if paths.lock.exists():
            with paths.lock.open("r+") as file:
                if not _try_lock(file.fileno()):
                    raise ConfigError(_running_message(paths, _read_holder(paths.lock)))
                fcntl.flock(file.fileno(), fcntl.LOCK_UN)
        if not force and _holds_a_run(paths):
            raise ConfigError(_occupied_message(paths))


def running_process(paths: RunPaths) -> str | None:
    """Who is running in a folder now, in words; None if nobody is."""
    try:
        with paths.lock.open("rb") as file:
            if _try_lock(file.fileno()):
                return None
    except FileNotFoundError:
        return None
    return _holder_in_words(_read_holder(paths.lock))


def last_holder(paths: RunPaths) -> Holder | None:
    """Who holds, or last held, a run's folder; None if nobody is known."""
    return _read_holder(paths.lock)


@contextlib.contextmanager
def claim_run_directory(paths: RunPaths, *, run_id: str, force: bool) -> Iterator[Path | None]:
    """Hold the run's folder while the context lasts; yields where an earlier run was moved to, if one was.

    What a killed earlier run of this name left in shared memory is removed. The lock is the kernel's (``flock``): it
    ends with this process, however that ends.

    Raises:
        ConfigError, ArealLikeError: as :func:`check_run_directory`.
    """
    with contextlib.ExitStack() as stack:
        with _told(paths):
            _check_usable(paths)
            paths.lock.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(paths.lock.open("ab", buffering=0))
            moved = _take(paths, file.fileno(), run_id=run_id, force=force)
        yield moved


def _take(paths: RunPaths, lock: int, *, run_id: str, force: bool) -> Path | None:
    """Lock the open file ``lock``, and make the folder; returns where an earlier run was moved to."""
    if not _try_lock(lock):
        raise ConfigError(_running_message(paths, _read_holder(paths.lock)))
    last = _read_holder(paths.lock)
    if last is not None:
        sweep(last.run_id)
    moved = None
    if _holds_a_run(paths):
        if not force:
            raise ConfigError(_occupied_message(paths))
        moved = _move_aside(paths.root)
    os.ftruncate(lock, 0)
    os.write(lock, json.dumps({"pid": os.getpid(), "run_id": run_id}).encode())
    paths.create()
    return moved


@contextlib.contextmanager
def _told(paths: RunPaths) -> Iterator[None]:
    """An OSError of the body, in words: a full disk is no fault of the experiment, anything else is."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or paths.root}: {error.strerror or error}"
        if error.errno in FULL:
            raise ArealLikeError(f"{what}; free space on its disk, or set runs_dir to another") from error
        raise ConfigError(f"runs_dir: {what}; set runs_dir to a folder that can be written") from error


def _check_usable(paths: RunPaths) -> None:
    """The folders that are missing can be made. Only trying tells: root may write everywhere but on /proc."""
    for path in (paths.root, *paths.root.parents):
        if os.path.lexists(path):
            if not path.is_dir():
                raise ConfigError(f"runs_dir: {path} is no folder; set runs_dir to a folder that can be written")
            break
    folder = next(path for path in paths.root.parents if path.is_dir())
    longest = os.pathconf(folder, "PC_NAME_MAX")
    for name in (*paths.root.parts, paths.lock.name):
        if len(os.fsencode(name)) > longest:
            raise ConfigError(f"runs_dir: {name!r:.60} is too long for a file's name ({longest} bytes); shorten it")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".areal-like-", dir=folder))
    except OSError as error:
        raise OSError(error.errno, f"nothing can be made in it ({error.strerror})", str(folder)) from None


def _holds_a_run(paths: RunPaths) -> bool:
    return paths.root.is_dir() and any(path != paths.evaluations for path in paths.root.iterdir())


def _move_aside(root: Path) -> Path:
    number = 1
    while (aside := root.with_name(f"{root.name}.old-{number}")).exists():
        number += 1
    root.rename(aside)
    return aside


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_holder(lock: Path) -> Holder | None:
    try:
        found: Any = json.loads(lock.read_text(encoding="utf-8"))
        run_id = str(found["run_id"])
        return Holder(pid=int(found["pid"]), run_id=run_id) if _RUN_ID.fullmatch(run_id) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # written half, or by hand: the kernel's lock decides, this is only for the message


def _occupied_message(paths: RunPaths) -> str:
    return f"{paths.root}: holds an earlier run; choose another trial_name=..., or pass --force to move it aside"


def _running_message(paths: RunPaths, holder: Holder | None) -> str:
    who = _holder_in_words(holder)
    return f"{paths.root}: {who} is running this trial now; stop it first, or choose another trial_name=..."


def _holder_in_words(holder: Holder | None) -> str:
    return f"process {holder.pid}" if holder is not None else "another process"
