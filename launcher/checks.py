"""Everything that can be found wrong before a process starts.

Each check looks at one thing and raises ConfigError, or returns warnings. :func:`check_experiment` runs them all and
raises once, with every fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like.api.weights import TransportKind
from areal_like.config.experiment import ExperimentConfig
from areal_like.config.paths import RunPaths
from areal_like.config.section import Section
from areal_like.errors import ConfigError
from areal_like.inference.backends import ENGINES, get_engine
from areal_like.rollout.datasets import read_jsonl
from areal_like.rollout.plugins import build_workflow, check_workflow, import_callable
from areal_like.rollout.tokenizer import FastTokenizer, load_tokenizer
from areal_like.weights.segments import segment_directory
from launcher.devices import Machine, this_machine
from launcher.engines import check_capabilities, engine_environment, engine_spec
from launcher.gpu_checks import check_devices, gpu_warnings
from launcher.model_files import ModelFacts, inspect_model, vocabulary_size
from launcher.processes import INFERENCE, TRAIN, compute_threads, plan_processes
from launcher.run_directory import check_run_directory
from launcher.transport_checks import LOOPBACK

#: rows whose prompts are measured; a few seconds at most
_MEASURED_ROWS = 5_000
#: copies of the weights that shared memory should have room for: the live one, the next, and the page table's slack
_SHM_COPIES = 3
#: keys of ``rollout`` that say how servers of ours are started
_OF_OUR_SERVERS = ("python", "environment", "device", "host", "port", "threads", "max_batch_size")
#: servers and ranks that a core may bear, as tests and trials on a laptop want it
_PROCESSES_OF_A_CORE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What was found of an experiment that may run. ``warnings`` are worth reading, and stop nothing."""

    warnings: tuple[str, ...]
    train_rows: int
    valid_rows: int
    model: ModelFacts


def check_experiment(
    config: ExperimentConfig, *, force: bool = False, run_directory: bool = True, machine: Machine | None = None
) -> CheckReport:
    """Run every check. ``force`` allows a folder that holds an earlier run; ``run_directory=False`` skips that check.

    Raises:
        ConfigError: one message with every fault.
    """
    machine = machine or this_machine()
    gathered = _Gathered()
    gathered.run(lambda: check_devices(config, machine))
    gathered.run(lambda: check_backend(config, machine))
    model = gathered.run(lambda: inspect_model(Path(config.model.path)))
    tokenizer = gathered.run(lambda: load_tokenizer(config.model.path)) if model is not None else None
    gathered.run(lambda: check_companions(config))
    rows = gathered.run(lambda: _read_dataset("train_dataset.path", config.train_dataset.path, None)) or []
    valid = _valid_rows(config, gathered)
    gathered.run(lambda: check_plugins(config, tokenizer))
    gathered.run(lambda: check_ports(config.rollout.host, config.rollout.port, config.rollout.spec.data))
    if run_directory:
        gathered.run(lambda: check_run_directory(RunPaths.of(config), force=force))
    if model is not None:
        gathered.run(lambda: check_context(config, model, rows, tokenizer))
        gathered.run(lambda: check_shared_memory(config, model))
    gathered.warnings += attach_warnings(config) + resource_warnings(config, machine, len(rows))
    gathered.raise_faults()
    if model is None:
        raise AssertionError("a model that could not be inspected is a fault")
    return CheckReport(warnings=tuple(gathered.warnings), train_rows=len(rows), valid_rows=len(valid), model=model)


class _Gathered:
    """Runs checks one after the other and keeps what they find."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.warnings: list[str] = []

    def run(self, check: Callable[[], Any]) -> Any:
        """The check's result, or None if it raised; a list of text is a list of warnings."""
        try:
            found = check()
        except ConfigError as error:
            self.faults.append(str(error))
            return None
        if isinstance(found, list) and all(isinstance(entry, str) for entry in found):
            self.warnings += found
        return found

    def raise_faults(self) -> None:
        if len(self.faults) == 1:
            raise ConfigError(self.faults[0])
        if self.faults:
            listed = "\n".join(f"  {fault}" for fault in self.faults)
            raise ConfigError(f"{len(self.faults)} faults\n{listed}")


def check_backend(config: ExperimentConfig, machine: Machine) -> None:
    """The engines are built, and the devices that were asked for exist."""
    spec = config.rollout.spec
    if spec.name == "embedded" and (spec.world_size != spec.data or spec.expert != 1):
        raise ConfigError(
            f"rollout.backend: {config.rollout.backend!r}: an embedded server computes on one device; "
            f"use embedded:d{spec.data}"
        )
    check_engine(config, machine)


def check_engine(config: ExperimentConfig, machine: Machine) -> None:
    """The engine's environment is there, its version can do what is asked, and its flags break nothing.

    Servers of others are asked when the run starts.
    """
    if config.rollout.spec.name not in ENGINES:
        return
    _check_temperatures(config)
    if config.rollout.servers:
        return
    get_engine(config.rollout.spec.name).check_interrupt(config.rollout.interrupt, config.engine_flags)
    python, version = engine_environment(config)
    check_capabilities(config, version, where=python)
    server = next(process for process in plan_processes(config, machine) if process.role == INFERENCE)
    get_engine(config.rollout.spec.name).command(engine_spec(config, server), token="")


def _check_temperatures(config: ExperimentConfig) -> None:
    """Requests would be refused one by one, which looks like a fault of the workflow."""
    name = config.rollout.spec.name
    least = get_engine(name).least_temperature
    for key, gconfig in (("gconfig", config.gconfig), ("eval_gconfig", config.eval_gconfig)):
        if gconfig is not None and not gconfig.greedy and 0.0 < gconfig.temperature < least:
            raise ConfigError(
                f"{key}.temperature: {gconfig.temperature:g} is below {least:g}, under which {name} does not sample as "
                f"asked; use 0 (greedy, for evaluation) or at least {least:g}"
            )


def check_companions(config: ExperimentConfig) -> None:
    """The folders of critic and reference hold models; the reference's words are the policy's."""
    ref = config.ref.path if config.ref is not None else None
    critic = config.critic.path if config.critic is not None else None
    for key, path in (("critic.path", critic), ("ref.path", ref)):
        if path is not None:
            try:
                inspect_model(Path(path))
            except ConfigError as error:
                raise ConfigError(str(error).replace("model.path", key, 1)) from None
    if ref is not None:
        sizes = [vocabulary_size(Path(path)) for path in (config.model.path, ref)]
        if None not in sizes and sizes[0] != sizes[1]:
            raise ConfigError(
                f"ref.path: {ref} knows {sizes[1]} tokens and model.path knows {sizes[0]}: their log-probs are not "
                "comparable; name a model of the same family"
            )


def check_plugins(config: ExperimentConfig, tokenizer: FastTokenizer | None) -> None:
    """The user's dotted paths import, and name the right kind of thing; with a tokenizer, the workflow is built."""
    check_workflow(config.workflow, has_reward=config.reward_fn is not None, workflow_args=config.workflow_args)
    for key, path in (("reward_fn", config.reward_fn), ("rollout.accept_fn", config.rollout.accept_fn)):
        if path is not None:
            import_callable(path, key)
    if tokenizer is not None:
        asyncio.run(_build_workflows(config, tokenizer))


async def _build_workflows(config: ExperimentConfig, tokenizer: FastTokenizer) -> None:
    """Build what the run will build, and as it will: under a running loop, which an ``__init__`` may ask for."""
    needed = [config.gconfig] if config.valid_dataset is None else [config.gconfig, config.evaluation_gconfig]
    for gconfig in needed:
        build_workflow(
            config.workflow,
            reward_fn=_no_reward if config.reward_fn is not None else None,
            gconfig=gconfig,
            tokenizer=tokenizer,
            workflow_args=config.workflow_args,
        )


async def _no_reward(
    prompt: str, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], /, **data: Any
) -> float:
    """Stands for the reward function where nothing is scored."""
    return 0.0


def check_ports(host: str, first: int, count: int) -> None:
    """Ports ``first`` to ``first + count - 1`` can be bound (0: the system will choose)."""
    if first == 0:
        return
    if first + count - 1 > 65535:
        raise ConfigError(f"rollout.port: {count} servers from port {first} end beyond 65535; use a lower port, or 0")
    for port in range(first, first + count):
        _check_port(host, port)


def _check_port(host: str, port: int) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"rollout.host: {host!r} is no address of this machine: {error}") from None
    with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"rollout.port: {host}:{port} is in use by another process; stop it, choose another port, "
                    f"or rollout.port=0 to let the system choose"
                ) from None
            raise ConfigError(f"rollout.port: {host}:{port} cannot be bound: {os.strerror(error.errno or 0)}") from None


def check_context(
    config: ExperimentConfig, model: ModelFacts, rows: Sequence[dict[str, Any]], tokenizer: FastTokenizer | None
) -> list[str]:
    """Prompts and answers fit into the model, as far as that can be known beforehand."""
    limit = model.context_length
    asked = config.rollout.context_length
    if limit is not None and asked is not None and asked > limit:
        raise ConfigError(f"rollout.context_length: {asked} exceeds the model's own limit of {limit}")
    limit = asked or limit
    if limit is None:
        return []
    if config.gconfig.min_new_tokens >= limit:
        raise ConfigError(
            f"gconfig.min_new_tokens: {config.gconfig.min_new_tokens} leaves no room for a prompt in {limit} tokens"
        )
    warnings = []
    if config.gconfig.max_new_tokens >= limit:
        warnings.append(
            f"gconfig.max_new_tokens ({config.gconfig.max_new_tokens}) is not below the context of {limit} tokens: "
            f"answers end where the context does"
        )
    return warnings + _prompt_warnings(config, _prompt_lengths(tokenizer, rows[:_MEASURED_ROWS]), limit)


def _prompt_warnings(config: ExperimentConfig, lengths: dict[int, int], limit: int) -> list[str]:
    if not lengths:
        return []
    longest = max(lengths, key=lambda row: lengths[row])
    length = lengths[longest]
    where = f"train_dataset.path: the prompt of row {longest + 1} has at least {length} tokens"
    if length >= limit:
        return [f"{where}, and the context holds {limit}: a request with it fails"]
    if length + config.gconfig.max_new_tokens > limit:
        return [f"{where}: with max_new_tokens={config.gconfig.max_new_tokens} it exceeds the context of {limit}"]
    return []


def _prompt_lengths(tokenizer: FastTokenizer | None, rows: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Tokens of the prompts that rows hold as text or ids, by row; a chat template adds to them."""
    lengths = {i: len(row["input_ids"]) for i, row in enumerate(rows) if isinstance(row.get("input_ids"), list)}
    texts = {i: row["prompt"] for i, row in enumerate(rows) if i not in lengths and isinstance(row.get("prompt"), str)}
    if texts and tokenizer is not None:
        lengths |= dict(zip(texts, tokenizer.count_tokens(list(texts.values())), strict=True))
    return lengths


def check_shared_memory(config: ExperimentConfig, model: ModelFacts) -> list[str]:
    """Containers often come with 64 MB of shared memory, where a writer is killed without a word."""
    if config.weights.transport is not TransportKind.SHM:
        return []
    free = shutil.disk_usage(segment_directory()).free
    text = f"weights.transport: shm: {segment_directory()} has {free >> 20} MiB free, the weights have"
    advice = "enlarge it (docker: --shm-size), or use weights.transport=disk"
    if free < model.weight_bytes:
        raise ConfigError(f"{text} {model.weight_bytes >> 20} MiB; {advice}")
    spec = config.rollout.spec
    copies = _SHM_COPIES + (spec.data if spec.name == "sglang" else 0)  # a folder for each of SGLang's servers
    if free < copies * model.weight_bytes:
        return [f"{text} {model.weight_bytes >> 20} MiB and may be there {copies} times; {advice}"]
    return []


def attach_warnings(config: ExperimentConfig) -> list[str]:
    """Keys that were set for servers of ours, where somebody else has started the servers."""
    rollout = config.rollout
    idle = [key for key in _OF_OUR_SERVERS if key in rollout.model_fields_set and key_differs(rollout, key)]
    if not rollout.servers or not idle:
        return []
    keys = ", ".join(f"rollout.{key}" for key in idle)
    return [f"{keys}: for servers that the run starts; those of rollout.servers stay as whoever started them said"]


def key_differs(section: Section, key: str) -> bool:
    """Whether a key has another value than its default."""
    return bool(getattr(section, key) != type(section).model_fields[key].get_default(call_default_factory=True))


def resource_warnings(config: ExperimentConfig, machine: Machine, rows: int) -> list[str]:
    """Settings that work, and hardly as they were meant."""
    warnings = []
    planned = plan_processes(config, machine)
    threads = compute_threads(planned)
    on_cpu = [p for p in planned if p.device == "cpu" and p.threads > 1]
    if threads > machine.cores and on_cpu:
        warnings.append(
            f"servers and ranks compute with {threads} threads on {machine.cores} cores, which can be 100 times "
            f"slower; lower rollout.threads or actor.threads"
        )
    crowd = sum(p.device == "cpu" and p.role in (INFERENCE, TRAIN) for p in planned)
    if crowd > _PROCESSES_OF_A_CORE * machine.cores:
        warnings.append(
            f"{crowd} servers and ranks are to compute on {machine.cores} cores, each with memory of its own; "
            "lower the sizes of rollout.backend or actor.backend"
        )
    warnings += gpu_warnings(config, machine)
    batch, eta = config.train_dataset.batch_size, config.rollout.max_head_offpolicyness
    if config.rollout.max_concurrent_rollouts < batch and eta == 0:
        warnings.append(
            f"rollout.max_concurrent_rollouts ({config.rollout.max_concurrent_rollouts}) is below "
            f"train_dataset.batch_size ({batch}): a synchronous step generates in several rounds"
        )
    if 0 < rows < batch:
        warnings.append(f"train_dataset: {rows} rows for a batch of {batch} groups: prompts repeat within a batch")
    if config.gconfig.n_samples == 1 and config.actor.normalisation.mean_level == "group":
        warnings.append(
            "gconfig.n_samples: 1, and rewards are compared within their group: every advantage is 0, unless the "
            "workflow returns several trajectories; raise n_samples, or set actor.advantage=reinforce_baseline"
        )
    if not config.rollout.host.startswith(LOOPBACK):
        warnings.append(f"rollout.host: {config.rollout.host} can be reached from other machines (token needed)")
    return warnings


def _valid_rows(config: ExperimentConfig, gathered: _Gathered) -> list[dict[str, Any]]:
    valid = config.valid_dataset
    if valid is None:
        return []
    return gathered.run(lambda: _read_dataset("valid_dataset.path", valid.path, valid.max_prompts)) or []


def _read_dataset(key: str, path: str, max_rows: int | None) -> list[dict[str, Any]]:
    try:
        return read_jsonl(path, max_rows=max_rows)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
