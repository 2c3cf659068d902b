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
from areal_like.inference.backends import ENGINES
from areal_like.weights.segments import segment_directory
from launcher.devices import Machine, this_machine
from launcher.engine_facts import EngineFacts, described, engine_pythons, find_engine
from launcher.plan import pairs

#: columns where the output is no terminal
_FILE_WIDTH = 140
_PACKAGES = ("areal-like", "torch", "transformers", "numpy", "pyzmq", "fastapi", "aiohttp")


def run(arguments: argparse.Namespace) -> int:
    named: dict[str, str | None] = dict.fromkeys(ROLLOUT_BACKENDS)
    if arguments.experiment is not None:
        config = load_config(arguments.experiment)
        named[config.rollout.spec.name] = config.rollout.python
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    machine = this_machine()
    engines = [facts for name, python in named.items() for facts in _found(name, python)]
    console.print(pairs("Machine", _machine_rows(machine)))
    console.print(pairs("Packages", {name: _version(name) for name in _PACKAGES}))
    for facts in engines:
        console.print(pairs(f"Engine {facts.name}", described(facts, gpus=machine.gpus)))
    console.print(pairs("Can run", _verdicts(machine, engines)))
    return 0


def _found(name: str, python: str | None) -> list[EngineFacts]:
    """An engine, in each environment of its own."""
    return (
        [find_engine(name, path) for path in engine_pythons(name, python)] if name in ENGINES else [find_engine(name)]
    )


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
    """Whether an experiment with each engine would start, on what, and with which of its environments."""
    names = dict.fromkeys(facts.name for facts in engines)
    return {str(BackendSpec(name=name)): _verdict(machine, [f for f in engines if f.name == name]) for name in names}


def _verdict(machine: Machine, found: list[EngineFacts]) -> str:
    on = f"{machine.gpus} GPUs" if machine.gpus else "the CPU"
    usable = [facts.where for facts in found if facts.capabilities]
    if not usable:
        return f"no: {found[0].trouble} (make engines, or rollout.python)"
    return f"yes, on {on}" + (f", with {' or '.join(usable)}" if found[0].name in ENGINES else "")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
