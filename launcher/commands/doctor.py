"""``areal-like doctor``: what this machine and the environments on it can run. Starts nothing."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Mapping

import psutil
from rich.console import Console

from areal_like.config.backend import BackendSpec
from areal_like.config.load import load_config
from areal_like.config.rollout import ROLLOUT_BACKENDS
from areal_like.weights.segments import segment_directory
from launcher.devices import Machine, this_machine
from launcher.engine_facts import EngineFacts, described, find_engine
from launcher.plan import pairs

#: columns where the output is no terminal
_FILE_WIDTH = 140
_PACKAGES = ("areal-like", "torch", "transformers", "numpy", "pyzmq", "fastapi", "aiohttp")


def run(arguments: argparse.Namespace) -> int:
    pythons: dict[str, str | None] = dict.fromkeys(ROLLOUT_BACKENDS)
    if arguments.experiment is not None:
        config = load_config(arguments.experiment)
        pythons[config.rollout.spec.name] = config.rollout.python
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    machine = this_machine()
    engines = [find_engine(name, python) for name, python in pythons.items()]
    console.print(pairs("Machine", _machine_rows(machine)))
    console.print(pairs("Packages", {name: _version(name) for name in _PACKAGES}))
    for facts in engines:
        console.print(pairs(f"Engine {facts.name}", described(facts)))
    console.print(pairs("Can run", _verdicts(machine, engines)))
    return 0


def _machine_rows(machine: Machine) -> Mapping[str, str]:
    memory, shared = psutil.virtual_memory(), shutil.disk_usage(segment_directory())
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "python": platform.python_version(),
        "cores": str(machine.cores),
        "GPUs": str(machine.gpus),
        "memory": f"{memory.available >> 30} GiB free of {memory.total >> 30}",
        "shared memory": f"{shared.free >> 20} MiB free in {segment_directory()}",
        "open files": f"{os.sysconf('SC_OPEN_MAX')}",
    }


def _verdicts(machine: Machine, engines: list[EngineFacts]) -> Mapping[str, str]:
    """Whether an experiment with each engine would start, and as what."""
    where = f"{machine.gpus} GPUs" if machine.gpus else "the CPU"
    return {
        str(BackendSpec(name=facts.name)): (
            f"yes, on {where}" if facts.capabilities else f"no: {facts.trouble} (make engines, or rollout.python)"
        )
        for facts in engines
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
