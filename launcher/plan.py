"""What a run would do, before it does it: batch arithmetic and staleness as numbers, then as tables."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from areal_like.config.experiment import ExperimentConfig
from areal_like.config.paths import RunPaths
from areal_like.errors import ConfigError
from launcher.devices import Machine
from launcher.engine_facts import EngineFacts, described, find_experiments_engine
from launcher.gpu_checks import check_devices, gpu_warnings
from launcher.model_files import inspect_model
from launcher.processes import PlannedProcess, compute_threads, plan_processes

#: packages whose versions decide what a run does
_VERSIONED = ("areal-like", "torch", "transformers", "numpy", "pyzmq", "fastapi", "aiohttp")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchArithmetic:
    """One step in numbers. ``trajectories`` assumes one an episode, which a workflow may change.

    Attributes:
        groups: prompts of one step (B).
        siblings: episodes of each.
        trajectories: rows of one step.
        minibatches: optimiser steps in it.
        groups_per_minibatch, rows_per_minibatch: what each takes.
        rows_per_rank: of a minibatch, on average.
        optimiser_steps: over the whole run.
        epochs: passes over the dataset in the whole run; None where its rows are unknown.
    """

    groups: int
    siblings: int
    trajectories: int
    minibatches: int
    groups_per_minibatch: int
    rows_per_minibatch: int
    rows_per_rank: float
    optimiser_steps: int
    epochs: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessPlan:
    """What η allows.

    Attributes:
        eta: the largest lag a trained group may have.
        slots: groups that may be anywhere between admission and consumption, (η + 1) · B.
        ahead: groups that may be generated before the batch of the current step is complete, η · B.
        running: groups that run at once, at most.
        episodes: episodes that run at once, at most.
    """

    eta: int
    slots: int
    ahead: int
    running: int
    episodes: int


def batch_arithmetic(config: ExperimentConfig, rows: int | None) -> BatchArithmetic:
    """``rows`` is the number of training prompts, None if unknown."""
    groups, siblings = config.train_dataset.batch_size, config.gconfig.n_samples
    minibatches = config.actor.ppo_n_minibatches
    per_minibatch = groups // minibatches
    return BatchArithmetic(
        groups=groups,
        siblings=siblings,
        trajectories=groups * siblings,
        minibatches=minibatches,
        groups_per_minibatch=per_minibatch,
        rows_per_minibatch=per_minibatch * siblings,
        rows_per_rank=per_minibatch * siblings / config.actor.spec.world_size,
        optimiser_steps=config.total_train_steps * minibatches,
        epochs=config.total_train_steps * groups / rows if rows else None,
    )


def staleness_plan(config: ExperimentConfig) -> StalenessPlan:
    eta, groups = config.rollout.max_head_offpolicyness, config.train_dataset.batch_size
    slots = min(eta + 1, config.total_train_steps) * groups
    running = min(slots, config.rollout.max_concurrent_rollouts)
    return StalenessPlan(
        eta=eta,
        slots=slots,
        ahead=slots - groups,
        running=running,
        episodes=running * config.gconfig.n_samples,
    )


def render_plan(config: ExperimentConfig, machine: Machine, rows: int | None) -> Group:
    """The whole plan as tables, for a console; below them what stops the run here, or slows it."""
    planned = plan_processes(config, machine)
    engine = find_experiments_engine(config)
    return Group(
        _process_table(config, planned, machine),
        pairs("Batch", _batch_rows(batch_arithmetic(config, rows))),
        pairs(f"Staleness (η = {config.rollout.max_head_offpolicyness})", _staleness_rows(config)),
        pairs("Engine", described(engine, gpus=machine.gpus)),
        pairs("Weights and files", _file_rows(config)),
        pairs("Versions", _versions()),
        *(Text(f"warning: {warning}") for warning in plan_warnings(config, machine, engine)),
    )


def plan_warnings(config: ExperimentConfig, machine: Machine, engine: EngineFacts) -> list[str]:
    """What is missing for the run on this machine: GPUs, the engine's environment, the model. ``check`` finds more."""
    warnings = gpu_warnings(config, machine)
    for check in (lambda: check_devices(config, machine), lambda: inspect_model(Path(config.model.path))):
        try:
            check()
        except ConfigError as error:
            warnings.append(str(error))
    if engine.capabilities is None and not config.rollout.servers:
        named = engine.trouble.startswith("rollout.")
        warnings.append(engine.trouble if named else f"rollout.python: {engine.where}: {engine.trouble}")
    return warnings


def _process_table(config: ExperimentConfig, planned: tuple[PlannedProcess, ...], machine: Machine) -> Table:
    title = (
        f"{config.experiment_name}/{config.trial_name}: {len(planned)} processes, {compute_threads(planned)} compute "
        f"threads on {machine.cores} cores, {machine.gpus} GPUs"
    )
    table = Table(title=title, title_justify="left")
    for heading in ("process", "device", "threads", "port", "what it is"):
        table.add_column(heading)
    purposes = {
        "controller": f"η = {config.rollout.max_head_offpolicyness}, admission, loop, weights, metrics",
        "inference": f"{config.rollout.backend}, {config.rollout.host}, batch ≤ {config.rollout.max_batch_size}",
        "train": ", ".join([config.actor.backend, config.model.dtype, config.actor.optimizer.type, *_roles(config)]),
        "reward": config.reward_fn or "",
    }
    for process in planned:
        port = {None: "–", 0: "any"}.get(process.port, str(process.port))
        cells = (process.name, process.device, str(process.threads), port, purposes[process.role])
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _roles(config: ExperimentConfig) -> list[str]:
    """What the ranks hold beside the policy."""
    return [name for name, held in (("critic", config.critic), ("reference", config.ref)) if held is not None]


def _batch_rows(batch: BatchArithmetic) -> Mapping[str, str]:
    epochs = "" if batch.epochs is None else f", {batch.epochs:.2f} epochs"
    return {
        "one step": f"{batch.groups} groups × {batch.siblings} siblings = {batch.trajectories} trajectories",
        "minibatches": (
            f"{batch.minibatches} × {batch.groups_per_minibatch} groups = {batch.minibatches} × "
            f"{batch.rows_per_minibatch} trajectories, {batch.rows_per_rank:g} per rank"
        ),
        "whole run": f"{batch.optimiser_steps} optimiser steps{epochs}",
    }


def _staleness_rows(config: ExperimentConfig) -> Mapping[str, str]:
    plan = staleness_plan(config)
    allowed = {
        "wait": f"every trained token is at most {plan.eta} versions old; nothing is dropped for being slow",
        "drop": f"every trained token is at most {plan.eta} versions old; older groups are cancelled and counted",
        "train": f"admission alone: lag is about {plan.eta} on average, and not bounded for slow groups",
    }
    sentence = allowed[config.rollout.on_stale]
    return {
        "rule": "synchronous, on-policy: generation waits for every update" if plan.eta == 0 else sentence,
        "slots": f"{plan.slots} groups between admission and training, {plan.ahead} of them ahead of the current batch",
        "at once": f"{plan.running} groups = {plan.episodes} episodes",
        "on a commit": f"requests in flight: {config.rollout.interrupt.value}",
    }


def _file_rows(config: ExperimentConfig) -> Mapping[str, str]:
    paths = RunPaths.of(config)
    return {
        "model": config.model.path,
        "transport": config.weights.transport.value,
        "run folder": str(paths.root),
        "metrics": str(paths.metrics.relative_to(paths.root)),
        "checkpoints": str(paths.checkpoints.relative_to(paths.root)),
        "logs": f"{paths.logs.relative_to(paths.root)}/<process>.log",
    }


def _versions() -> Mapping[str, str]:
    return {"python": platform.python_version()} | {name: _version(name) for name in _VERSIONED}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def pairs(title: str, rows: Mapping[str, str]) -> Table:
    """A table of names and what they are."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table
