"""The processes of a run on this host: started, watched, and gone when the run is over.

    start --> running --> exited                 (asked to stop: fine; not asked: ``watch`` raises ProcessDied)
                 |
               stop: SIGTERM to the group --> grace --> SIGKILL to the group --> sweep sockets and shared memory

Every child leads a session of its own, so that Ctrl-C in the terminal reaches the controller alone, which then ends
its children in order; and so that a child's own children can be ended with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from areal_like.config.paths import RunPaths
from areal_like.errors import ProcessDied
from launcher.environment import child_environment
from launcher.leftovers import make_socket_folder, sweep, sweep_engine_memory
from launcher.log_text import readable_lines

#: lines of a dead process's log that its error shows
_LAST_LINES = 20
#: bytes read from the end of a log to find them
_TAIL_BYTES = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleProcess:
    """One child: ``name`` is ``<role>-<index>``, and its log ``logs/<name>.log``."""

    role: str
    index: int
    pid: int
    log: Path

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherStatistics:
    started: int
    running: int
    killed: int


@dataclass(slots=True, kw_only=True)
class _Child:
    role: RoleProcess
    process: Process
    watcher: asyncio.Task[None] | None = None
    stopping: bool = False

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None


class LocalLauncher:
    """Starts ``python -m launcher.roles <role> <spec file>`` for every child of one run. An async context manager.

    Leaving the context stops every child; it takes at most ``term_grace + kill_grace`` seconds.
    Children are bound to the thread that starts them (see :func:`launcher.child.die_with_parent`): call
    :meth:`start` from the main thread's event loop.
    """

    def __init__(
        self,
        *,
        paths: RunPaths,
        run_id: str,
        token: str,
        term_grace: float = 5.0,
        kill_grace: float = 2.0,
        command: Sequence[str] = (sys.executable, "-m", "launcher.roles"),
    ) -> None:
        self.paths = paths
        self.run_id = run_id
        self._token = token
        self._term_grace = term_grace
        self._kill_grace = kill_grace
        self._command = tuple(command)
        self._children: list[_Child] = []
        self._exited = asyncio.Event()
        self._killed = 0
        self._stopping = False
        self._began = time.time()
        #: folder of mode 0700 for the run's ``ipc://`` sockets
        self.socket_folder = make_socket_folder(run_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(
        self,
        role: str,
        index: int,
        spec: str,
        *,
        threads: int,
        environment: Mapping[str, str] | None = None,
        entry: str | None = None,
    ) -> RoleProcess:
        """Start one child. ``spec`` (JSON) goes into a file of mode 0600 that the child is told to read.

        ``entry`` is the name by which ``launcher.roles`` knows its program, where it is not ``role``.

        Raises:
            ProcessDied: the interpreter could not be started, or the run is being stopped.
        """
        name = f"{role}-{index}"
        if self._stopping:
            raise ProcessDied(f"{name}: not started, the run is being stopped")
        spec_file = self.paths.specs / f"{name}.json"
        self.paths.specs.mkdir(parents=True, exist_ok=True)
        self.paths.logs.mkdir(parents=True, exist_ok=True)
        _write_private(spec_file, spec)
        log = self.paths.logs / f"{name}.log"
        variables = child_environment(threads=threads, token=self._token, run_id=self.run_id, extra=environment)
        with log.open("ab") as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command, entry or role, str(spec_file),
                    stdin=DEVNULL, stdout=output, stderr=output, env=variables, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise ProcessDied(f"{name}: {self._command[0]} could not be started: {error.strerror}") from error
        child = _Child(role=RoleProcess(role=role, index=index, pid=process.pid, log=log), process=process)
        child.watcher = asyncio.create_task(self._await_exit(child), name=f"watch {name}")
        self._children.append(child)
        return child.role

    async def watch(self) -> NoReturn:
        """Wait until a child ends that was not asked to. A child that is needed and returns is an error, too.

        Raises:
            ProcessDied: names the process, how it ended, and its last log lines.
        """
        while True:
            for child in self._children:
                if child.ended and not child.stopping:
                    raise ProcessDied(describe_death(child.role, child.process.returncode or 0))
            self._exited.clear()
            await self._exited.wait()

    async def stop(self) -> None:
        """End every child with its whole process group, then remove the run's sockets and shared memory.

        Idempotent. A second cancellation while it waits kills at once, rather than leave anything behind.
        """
        self._stopping = True
        for child in self._children:
            child.stopping = True
        try:
            self._signal_groups(signal.SIGTERM)
            if await self._wait_ended(self._term_grace):
                return
            self._killed += sum(not child.ended for child in self._children)
            self._signal_groups(signal.SIGKILL)
            await self._wait_ended(self._kill_grace)
        finally:
            self._signal_groups(signal.SIGKILL)
            sweep(self.run_id)
            sweep_engine_memory(self._began)

    def statistics(self) -> LauncherStatistics:
        running = sum(not child.ended for child in self._children)
        return LauncherStatistics(started=len(self._children), running=running, killed=self._killed)

    @property
    def running(self) -> tuple[RoleProcess, ...]:
        return tuple(child.role for child in self._children if not child.ended)

    async def _await_exit(self, child: _Child) -> None:
        await child.process.wait()
        # whatever the child had started and not ended itself; its id cannot have been given away in this instant
        _signal_group(child.process.pid, signal.SIGKILL)
        self._exited.set()

    async def _wait_ended(self, timeout: float) -> bool:
        watchers = [child.watcher for child in self._children if child.watcher is not None and not child.watcher.done()]
        if not watchers:
            return True
        _, pending = await asyncio.wait(watchers, timeout=timeout)
        return not pending

    def _signal_groups(self, number: signal.Signals) -> None:
        for child in self._children:
            if not child.ended:
                _signal_group(child.process.pid, number)


def describe_death(role: RoleProcess, returncode: int) -> str:
    """How a process ended, and the end of its log."""
    lines = tail(role.log, _LAST_LINES)
    shown = "\n".join(f"  | {line}" for line in lines) if lines else "  (its log says nothing)"
    return f"{role.name} (pid {role.pid}) {_how_it_ended(returncode)}; last lines of {role.log}:\n{shown}"


def tail(path: Path, count: int) -> list[str]:
    """The last ``count`` lines of a text file; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return readable_lines(text)[-count:]


def _how_it_ended(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit code {returncode}" + ("" if returncode else " although the run still needed it")
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hint = " (often: out of memory)" if returncode == -signal.SIGKILL else ""
    return f"was ended by {name}{hint}"


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _write_private(path: Path, text: str) -> None:
    """Write a file that only we can read: a spec holds the run's keys."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
