"""What an engine's environment holds and can do, in words: for ``plan`` and ``doctor``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import areal_like
from areal_like.api.weights import TransportKind
from areal_like.config.experiment import ExperimentConfig
from areal_like.errors import ConfigError
from areal_like.inference.backends import ENGINES, get_backend, get_engine
from areal_like.inference.backends.base import Capabilities
from launcher.environments import installed_version, suggested_python


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """One engine as it was found. ``capabilities`` is None where it cannot be used, and ``trouble`` says why."""

    name: str
    where: str
    capabilities: Capabilities | None
    trouble: str = ""


def default_python(name: str) -> str:
    """Where ``make engines`` puts an engine."""
    return str(Path(f".venv-{name}") / "bin" / "python")


def engine_pythons(name: str, named: str | None = None) -> list[str]:
    """Interpreters of the environments to look into for an engine: ``named`` first, then every ``.venv-<name>*`` here.

    Where there is none at all, the one that ``make engines`` would make.
    """
    here = map(str, sorted(Path().glob(f".venv-{name}*/bin/python"), key=lambda path: path.parts))
    found: dict[str, str] = {}
    for path in [*([named] if named else []), *here]:
        found.setdefault(os.path.abspath(path), path)  # not resolved: every environment's links to the same program
    return list(found.values()) or [default_python(name)]


def find_engine(name: str, python: str | None = None, *, device: str = "auto") -> EngineFacts:
    """Look into an engine's environment; imports nothing there, starts no server, and raises nothing.

    ``device``: where its servers are to compute.
    """
    if name not in ENGINES:
        found = get_backend(name).capabilities(areal_like.__version__)
        return EngineFacts(name=name, where="this environment", capabilities=found)
    python = python or default_python(name)
    try:
        engine = get_engine(name)
        version = installed_version(python, engine.package, suggested=suggested_python(name, device))
        if not version:
            return EngineFacts(name=name, where=python, capabilities=None, trouble="not installed there")
        if engine.needs_us and not installed_version(python, ("areal-like",)):
            trouble = "areal-like is not installed there (pip install --no-deps -e .), and its weights need it"
            return EngineFacts(name=name, where=python, capabilities=None, trouble=trouble)
        return EngineFacts(name=name, where=python, capabilities=engine.capabilities(version))
    except (ConfigError, ImportError) as error:
        return EngineFacts(name=name, where=python, capabilities=None, trouble=str(error))


def find_experiments_engine(config: ExperimentConfig) -> EngineFacts:
    """The engine that an experiment asks for; of servers that others started nothing is known before they are asked."""
    name = config.rollout.spec.name
    if config.rollout.servers:
        servers = ", ".join(config.rollout.servers)
        return EngineFacts(name=name, where=servers, capabilities=None, trouble="asked when the run starts")
    return find_engine(name, config.rollout.python, device=config.rollout.device)


def described(facts: EngineFacts, *, gpus: int) -> Mapping[str, str]:
    """Rows of a table, on a machine with ``gpus``."""
    found = facts.capabilities
    if found is None:
        return {"engine": f"{facts.name} at {facts.where}", "state": facts.trouble}
    missing = "; ".join(f"{what} needs {found.engine} >= {version}" for what, version in sorted(found.since.items()))
    return {
        "engine": f"{found.engine} {found.version} at {facts.where}",
        "version of each token": "told by the engine" if found.spans else "from the client's segments",
        "interrupts": ", ".join(sorted(found.interrupts)) + (f" ({missing})" if missing else ""),
        "transports": _transports(found, gpus),
        "seeded answers": f"{found.seeds}, if no commit cuts them",
        "memory release": found.memory or "no",
    }


def _transports(found: Capabilities, gpus: int) -> str:
    usable = found.transports if gpus else found.transports - {TransportKind.IPC}
    missing = " (ipc needs a GPU)" if usable != found.transports else ""
    return ", ".join(sorted(usable)) + missing
