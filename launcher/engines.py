"""From the experiment to its inference servers, whatever their engine: how they are started and talked to."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass

from areal_like.config.experiment import ExperimentConfig
from areal_like.errors import ConfigError
from areal_like.inference.backends import ENGINES, get_backend, get_engine
from areal_like.inference.backends.base import Capabilities, LinkSettings, ServerLink, require
from areal_like.inference.spec import EngineSpec, InferenceServerSpec
from launcher.child import TOKEN_VARIABLE
from launcher.environments import installed_version, suggested_python
from launcher.processes import PlannedProcess
from launcher.roles import ENGINE, INFERENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPart:
    """A server's program among the roles, and its spec as JSON."""

    entry: str
    spec: str


def server_part(config: ExperimentConfig, process: PlannedProcess) -> ServerPart:
    """What one planned server is started with."""
    if config.rollout.spec.name in ENGINES:
        return ServerPart(entry=ENGINE, spec=engine_spec(config, process).model_dump_json())
    return ServerPart(entry=INFERENCE, spec=embedded_spec(config, process).model_dump_json())


def embedded_spec(config: ExperimentConfig, process: PlannedProcess) -> InferenceServerSpec:
    return InferenceServerSpec(
        name=process.name,
        model_path=config.model.path,
        dtype=config.model.dtype,
        attn_implementation=config.model.attn_implementation,
        device=process.device,
        host=config.rollout.host,
        port=process.port or 0,
        threads=process.threads,
        max_batch_size=config.rollout.max_batch_size,
        context_length=config.rollout.context_length,
        seed=config.seed,
    )


def engine_spec(config: ExperimentConfig, process: PlannedProcess) -> EngineSpec:
    """For an engine with a program of its own.

    Raises:
        ConfigError: no interpreter was named.
    """
    rollout = config.rollout
    python, version = engine_environment(config)
    return EngineSpec(
        backend="vllm" if rollout.spec.name == "vllm" else "sglang",
        name=process.name,
        python=python,
        version=version,
        model_path=config.model.path,
        dtype=config.model.dtype,
        devices=process.devices,
        host=rollout.host,
        port=process.port or 0,
        threads=process.threads,
        tensor=rollout.spec.tensor,
        pipeline=rollout.spec.pipeline,
        max_batch_size=rollout.max_batch_size,
        context_length=rollout.context_length,
        transport=config.weights.transport,
        seed=config.seed,
        start_timeout=rollout.start_timeout,
        flags=dict(config.engine_flags),
        environment=dict(rollout.environment),
    )


def engine_environment(config: ExperimentConfig) -> tuple[str, str]:
    """The interpreter of the engine's environment, and the engine's version there.

    Raises:
        ConfigError: no interpreter was named, or the engine is not installed there.
    """
    name, python = config.rollout.spec.name, config.rollout.python
    suggested = suggested_python(name, config.rollout.device)
    if python is None:
        raise ConfigError(
            f"rollout.python: {name} runs in an environment of its own; name its interpreter, such as {suggested}"
        )
    version = installed_version(python, get_engine(name).package, suggested=suggested)
    if not version:
        raise ConfigError(f"rollout.python: {python} has no {name}; install it there, or name {suggested}")
    return python, version


def servers_token(config: ExperimentConfig, own: str) -> str:
    """The bearer token of the servers: the run's own, or the environment's for servers that somebody else started."""
    if not config.rollout.servers:
        return own
    return os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(32)


def check_capabilities(config: ExperimentConfig, version: str, where: str) -> Capabilities:
    """What the version found at ``where`` can do.

    Raises:
        ConfigError: it cannot do what the experiment asks; the message names the version that can.
    """
    found = get_backend(config.rollout.spec.name).capabilities(version)
    require(found, interrupt=config.rollout.interrupt, transport=config.weights.transport, where=where)
    return found


async def open_link(config: ExperimentConfig, name: str, url: str, token: str) -> ServerLink:
    """Ask a running server for its version, and connect if that can do what the experiment asks.

    Raises:
        ConfigError: it cannot.
        ServerUnavailable: it does not answer.
    """
    backend, timeout = get_backend(config.rollout.spec.name), config.rollout.control_timeout
    version = await backend.version(url, token=token, timeout=timeout)
    check_capabilities(config, version, where=f"{name} at {url}")
    settings = LinkSettings(
        token=token,
        version=version,
        transport=config.weights.transport,
        timeout=timeout,
        attached=bool(config.rollout.servers),
    )
    return backend.connect(name, url, settings)
