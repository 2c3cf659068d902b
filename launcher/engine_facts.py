"""What an engine's environment holds and can do, in words: for ``plan`` and ``doctor``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import areal_like
from areal_like.config.experiment import ExperimentConfig
from areal_like.errors import ConfigError
from areal_like.inference.backends import ENGINES, get_backend, get_engine
from areal_like.inference.backends.base import Capabilities
from launcher.environments import installed_version


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


def find_engine(name: str, python: str | None = None) -> EngineFacts:
    """Look into an engine's environment; imports nothing there, starts no server, and raises nothing."""
    if name not in ENGINES:
        found = get_backend(name).capabilities(areal_like.__version__)
        return EngineFacts(name=name, where="this environment", capabilities=found)
    python = python or default_python(name)
    try:
        engine = get_engine(name)
        version = installed_version(python, engine.package)
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
    return find_engine(name, config.rollout.python)


def described(facts: EngineFacts) -> Mapping[str, str]:
    """Rows of a table."""
    found = facts.capabilities
    if found is None:
        return {"engine": f"{facts.name} at {facts.where}", "state": facts.trouble}
    missing = "; ".join(f"{what} needs {found.engine} >= {version}" for what, version in sorted(found.since.items()))
    return {
        "engine": f"{found.engine} {found.version} at {facts.where}",
        "version of each token": "told by the engine" if found.spans else "from the client's segments",
        "interrupts": ", ".join(sorted(found.interrupts)) + (f" ({missing})" if missing else ""),
        "transports": ", ".join(sorted(found.transports)),
        "seeded answers": f"{found.seeds}, if no commit cuts them",
        "memory release": found.memory or "no",
    }
