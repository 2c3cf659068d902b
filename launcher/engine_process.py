"""The role that keeps one server of an engine with a program of its own: starts it, reports it, and ends with it.

    start --> engine answers its health path --> registered --> engine ends: so do we, with its status
                |                                    |
              it dies, or the deadline passes      SIGTERM: its whole group ends, then we

Under the launcher, we and everything the engine starts are one process group, which the launcher kills when we end.
The engine cannot outlive us: on SIGTERM (ours when the controller dies, whatever kills it) we end the group.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import httpx

from areal_like.errors import InfrastructureError
from areal_like.inference.backends import get_engine
from areal_like.inference.backends.base import EngineCommand
from areal_like.inference.spec import EngineSpec
from launcher.child import TOKEN_VARIABLE
from launcher.leftovers import sweep_engine_memory

#: seconds between two looks at a server that starts
_LOOK = 0.25
#: seconds one look may take
_LOOK_TIMEOUT = 5.0
#: how variables are called that hold secrets
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
#: seconds the engine gets to end by itself; below the launcher's own grace, so that we clean up behind it
_GRACE = 1.5


class _Asked(Exception):
    """SIGTERM came."""


def run_engine(spec: EngineSpec, token: str, on_ready: Callable[[str], None]) -> None:
    """Start the server, call ``on_ready`` with its URL once it is healthy, and stay until it ends.

    Raises:
        ConfigError: a flag contradicts what the contract needs.
        InfrastructureError: it could not be started, died, or was not healthy in time.
    """
    began = time.time()
    spec = spec.model_copy(update={"port": spec.port or free_port(spec.host)})
    command = get_engine(spec.backend).command(spec, token=token)
    sys.stderr.write(f"starting {command_line(command, token)}\n")
    with suppress(_Asked), _interruptible(), _engine(command, began) as process:
        url = f"http://{spec.host}:{spec.port}"
        _wait_healthy(process, f"{url}{command.health_path}", token, spec.start_timeout)
        on_ready(url)
        raise InfrastructureError(f"{spec.name}: the engine ended with status {process.wait()}")


def command_line(command: EngineCommand, token: str) -> str:
    """What a shell starts the same server with: its variables, then its words, all of them quoted.

    Logs are read by others, so what is secret stands as the variable that holds it: our token, and what the
    experiment passes on under a name that says so.
    """

    def shown(name: str, value: str) -> str:
        if value == token:
            return f"${TOKEN_VARIABLE}"
        return f"${name}" if name.upper().endswith(_SECRET) else shlex.quote(value)

    variables = [f"{name}={shown(name, value)}" for name, value in command.environment.items()]
    return " ".join([*variables, shlex.join(command.arguments)])


def free_port(host: str) -> int:
    """A TCP port that nobody listens on now; somebody else could take it before the engine does, who then says so."""
    with socket.create_server((host, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def _engine(command: EngineCommand, began: float) -> Iterator[subprocess.Popen[bytes]]:
    """The engine, in our process group if we lead one; all that it started is gone afterwards, memory files too."""
    leads = os.getpgrp() == os.getpid()
    try:
        process = subprocess.Popen(
            command.arguments, env={**os.environ, **command.environment}, start_new_session=not leads
        )
    except OSError as error:
        raise InfrastructureError(
            f"{command.arguments[0]} could not be started: {error.strerror}; rollout.python must name the interpreter "
            "of the engine's environment (docs/engines.md)"
        ) from error
    try:
        yield process
    finally:
        end_group(process, os.getpgrp() if leads else process.pid)
        sweep_engine_memory(began)


def end_group(process: subprocess.Popen[bytes], group: int) -> None:
    """SIGTERM to the engine, then SIGKILL to whatever is left of ``group``, except ourselves."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    for pid in group_members(group):
        if pid != os.getpid():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


def group_members(group: int) -> list[int]:
    """Processes of a process group, read from /proc (Linux)."""
    members = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if os.getpgid(int(entry)) == group:
                    members.append(int(entry))
            except ProcessLookupError:
                continue
    return members


@contextmanager
def _interruptible() -> Iterator[None]:
    """The first SIGTERM ends what runs; later ones find us cleaning up, and must not break that off."""

    def asked(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Asked

    before = signal.signal(signal.SIGTERM, asked)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN if before is signal.SIG_DFL else before)


def _wait_healthy(process: subprocess.Popen[bytes], url: str, token: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    with httpx.Client(trust_env=False, timeout=_LOOK_TIMEOUT, headers={"Authorization": f"Bearer {token}"}) as http:
        while time.monotonic() < deadline:
            status = process.poll()
            if status is not None:
                raise InfrastructureError(f"the engine ended with status {status} before it was healthy")
            if _answers(http, url):
                return
            time.sleep(_LOOK)
    raise InfrastructureError(f"{url} was not healthy within {timeout:g} s; raise rollout.start_timeout")


def _answers(http: httpx.Client, url: str) -> bool:
    try:
        return http.get(url).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
