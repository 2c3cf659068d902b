"""Servers of the benchmarks of weight updates: started, waited for, and ended whatever ends the benchmark."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_runs import leave_on_signals

from areal_like.inference.backends import get_engine
from areal_like.inference.spec import EngineSpec, InferenceServerSpec
from launcher.child import PARENT_VARIABLE
from launcher.environments import installed_version

ROOT = Path(__file__).resolve().parents[1]
#: a child trainer is given its parent's
TOKEN = os.environ.get("AREAL_LIKE_TOKEN") or secrets.token_urlsafe(16)
#: seconds between two looks at a server that starts
_LOOK = 0.05
_PLAY = """
import os, signal, sys
from launcher.child import die_with_parent
die_with_parent(signal.SIGTERM)
from areal_like.inference.spec import EngineSpec, InferenceServerSpec
kind, spec, token, ready_file = sys.argv[1:]
def ready(url):
    with open(ready_file + "~", "w") as file:
        file.write(url)
    os.rename(ready_file + "~", ready_file)
if kind == "embedded":
    from areal_like.inference.embedded.server import run_server
    run_server(InferenceServerSpec.model_validate_json(spec), token, ready)
else:
    from launcher.engine_process import run_engine
    run_engine(EngineSpec.model_validate_json(spec), token, ready)
"""


@dataclass(slots=True, kw_only=True)
class Server:
    """A server in a process group of its own; without ``process`` it is somebody else's."""

    engine: str
    name: str
    url: str
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None
    seconds_to_start: float = 0.0

    def said(self) -> str:
        return "" if self.log is None else self.log.read_text(errors="replace")[-3000:]

    def ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def send(self, number: signal.Signals) -> None:
        """To every process of the server."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


#: of this process; ended by :func:`end_servers`, whatever ends the benchmark
_RUNNING: list[Server] = []


def server_spec(engine: str, model: Path, name: str, **settings: Any) -> InferenceServerSpec | EngineSpec:
    """``settings`` are fields of the spec; ``python`` is the interpreter of an engine with a program of its own."""
    if engine == "embedded":
        return InferenceServerSpec(name=name, model_path=str(model), **settings)
    python = settings.pop("python")
    return EngineSpec(
        backend="vllm" if engine == "vllm" else "sglang",
        name=name,
        python=python,
        version=engine_version(python, engine),
        model_path=str(model),
        **settings,
    )


def engine_version(python: str, engine: str) -> str:
    """Also where the engine is on PYTHONPATH only. Empty for our own."""
    if engine == "embedded":
        return ""
    packages = get_engine(engine).package
    found = installed_version(python, packages)
    for package in packages if not found else ():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return found


@contextmanager
def running(engine: str, spec: InferenceServerSpec | EngineSpec, folder: Path, timeout: float) -> Iterator[Server]:
    """A server that answers; it is gone afterwards.

    Raises:
        RuntimeError: it did not start; the message ends with its log's last lines.
    """
    mark = folder / f"{spec.name}-{secrets.token_hex(3)}"
    log, ready = mark.with_suffix(".log"), mark.with_suffix(".url")
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _PLAY, engine, spec.model_dump_json(), TOKEN, str(ready)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": _python_path(folder), PARENT_VARIABLE: str(os.getpid())},
            start_new_session=True,
        )
    server = Server(engine=engine, name=spec.name, url="", process=process, log=log)
    _RUNNING.append(server)
    try:
        while not ready.exists():
            if process.poll() is not None or time.monotonic() - began > timeout:
                raise RuntimeError(f"{engine} did not start in {time.monotonic() - began:.0f} s:\n{server.said()}")
            time.sleep(_LOOK)
        server.url = ready.read_text()
        server.seconds_to_start = time.monotonic() - began
        yield server
    finally:
        end_server(server)


def _python_path(folder: Path) -> str:
    """This checkout, and an entry point for vLLM's processes where the package itself is not installed."""
    plugin = folder / "plugin" / "areal_like_checkout-0.dist-info"
    plugin.mkdir(parents=True, exist_ok=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: areal-like-checkout\nVersion: 0\n")
    (plugin / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nareal_like = areal_like.inference.vllm_plugin:register\n"
    )
    return os.pathsep.join(filter(None, [str(ROOT), str(plugin.parent), os.environ.get("PYTHONPATH", "")]))


def end_server(server: Server) -> None:
    """Ask it to end, then end what is left of it."""
    if server in _RUNNING and server.process is not None:
        _RUNNING.remove(server)
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.process.wait(10)
        server.send(signal.SIGKILL)
        server.process.wait()


def end_at(seconds: float, leave: Callable[[], None]) -> None:
    """A hard limit: after ``seconds`` call ``leave``, end every server and this process, wherever it hangs."""

    def end() -> None:
        with contextlib.suppress(Exception):  # nothing may keep us from ending
            leave()
        for server in _RUNNING:
            server.send(signal.SIGKILL)
        os._exit(124)

    leave_on_signals()
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
