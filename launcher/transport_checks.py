"""Rules of weights that travel between GPUs: who must share one, and who must not."""

from __future__ import annotations

from collections import Counter
from urllib.parse import urlsplit

from areal_like.api.weights import TransportKind
from areal_like.config.experiment import ExperimentConfig
from areal_like.errors import ConfigError
from launcher.devices import Machine
from launcher.processes import INFERENCE, TRAIN, plan_processes

#: how addresses begin that only this machine can reach
LOOPBACK = ("127.", "localhost", "::1")


def check_collective(config: ExperimentConfig, machine: Machine) -> None:
    """NCCL needs a GPU for every member of a group; gloo does with host memory.

    Raises:
        ConfigError: a member has none, or two would share one.
    """
    if config.weights.transport is not TransportKind.COLLECTIVE or config.weights.group == "gloo":
        return
    trainer, servers = _devices(config, machine)
    if trainer == "cpu" and config.weights.group == "auto":
        return
    who = "auto means nccl here, which needs" if config.weights.group == "auto" else "nccl needs"
    where = f"weights.group: {who} a GPU for the trainer ({trainer}) and"
    if "cpu" in {trainer, *servers}:
        raise ConfigError(f"{where} for each server ({', '.join(sorted(set(servers)))}); use weights.group=gloo")
    shared = sorted(device for device, count in Counter([trainer, *servers]).items() if count > 1)
    if shared:
        advice = "weights.transport=ipc (vLLM and embedded)" if set(servers) == {trainer} else "weights.group=gloo"
        raise ConfigError(
            f"{where} others for the servers ({', '.join(sorted(servers))}), and {', '.join(shared)} would have "
            f"several members (NCCL: duplicate GPU); use more GPUs, or {advice}"
        )


def check_ipc(config: ExperimentConfig, machine: Machine) -> None:
    """Handles of GPU memory travel in the open, to processes on the same GPU: loopback, and one GPU for all.

    Raises:
        ConfigError: a server could be reached from elsewhere, or computes on another device than train rank 0.
    """
    if config.weights.transport is not TransportKind.IPC:
        return
    if config.rollout.spec.name == "sglang":
        raise ConfigError(
            "weights.transport: ipc: SGLang takes handles of GPU memory only as pickles, which are never sent; use "
            "shm, or vLLM"
        )
    hosts = [urlsplit(url).hostname or "" for url in config.rollout.servers or ()] or [config.rollout.host]
    for host in hosts:
        if not host.startswith(LOOPBACK):
            raise ConfigError(
                f"weights.transport: ipc: handles of the trainer's GPU memory may only go to servers on loopback, and "
                f"{host} is none; use rollout.host=127.0.0.1, or another transport"
            )
    trainer, servers = _devices(config, machine)
    if trainer == "cpu":
        raise ConfigError("weights.transport: ipc shares memory of a GPU, and the trainer is on the CPU; use shm")
    elsewhere = sorted(set(servers) - {trainer})
    if elsewhere:
        raise ConfigError(
            f"weights.transport: ipc: train rank 0 is on {trainer} and servers would be on {', '.join(elsewhere)}: all "
            "must share that one GPU; use weights.transport=collective (group: nccl) where each has its own, or shm"
        )


def _devices(config: ExperimentConfig, machine: Machine) -> tuple[str, list[str]]:
    """Where train rank 0 is, and each device of each server of ours (a device per worker)."""
    planned = plan_processes(config, machine)
    trainer = next(process.device for process in planned if process.role == TRAIN)
    return trainer, [device for process in planned if process.role == INFERENCE for device in process.devices]
