"""Which processes a run consists of, and what each may use. Pure: facts in, plan out."""

from __future__ import annotations

from dataclasses import dataclass

from areal_like.config.experiment import ExperimentConfig
from launcher.devices import Machine

CONTROLLER = "controller"
INFERENCE = "inference"
TRAIN = "train"
REWARD = "reward"

#: sections of an experiment whose processes may compute on GPUs
ROLLOUT = "rollout"
ACTOR = "actor"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProcess:
    """One process of a run.

    Attributes:
        device: ``cpu`` or ``cuda:<number>`` as torch counts them in the whole run.
        threads: compute threads it gets.
        port: TCP port; 0: the system chooses; None: it listens on none.
        more_devices: those besides ``device``, for a server that computes on several.
    """

    role: str
    index: int
    device: str
    threads: int
    port: int | None = None
    more_devices: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        return (self.device, *self.more_devices)

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


def plan_processes(config: ExperimentConfig, machine: Machine) -> tuple[PlannedProcess, ...]:
    """The processes of one run. Servers get the first GPUs and ranks the next ones; they share when there are fewer."""
    servers, ranks = config.rollout.spec.data, config.actor.spec.data
    server_gpus = config.rollout.spec.devices_per_server
    on_gpu = _uses_gpu(config.rollout.device, machine)
    planned = [PlannedProcess(role=CONTROLLER, index=0, device="cpu", threads=1)]
    planned += [
        PlannedProcess(
            role=INFERENCE,
            index=i,
            device=_device(on_gpu, i * server_gpus, machine),
            threads=config.rollout.threads,
            port=config.rollout.port + i if config.rollout.port else 0,
            more_devices=tuple(
                _device(on_gpu, i * server_gpus + place, machine) for place in range(1, server_gpus if on_gpu else 1)
            ),
        )
        for i in range(0 if config.rollout.servers else servers)
    ]
    first_rank_gpu = servers * server_gpus if on_gpu and not config.rollout.servers else 0
    planned += [
        PlannedProcess(
            role=TRAIN,
            index=i,
            device=_device(_uses_gpu(config.actor.device, machine), first_rank_gpu + i, machine),
            threads=config.actor.threads,
        )
        for i in range(ranks)
    ]
    if config.reward_fn is not None:
        planned += [
            PlannedProcess(role=REWARD, index=i, device="cpu", threads=1) for i in range(config.rewards.workers)
        ]
    return tuple(planned)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDemand:
    """What one section of the experiment asks for.

    Attributes:
        backend: as it is written there.
        gpus: what its processes would use if none were shared.
        apart: how many of them must be different ones, as their processes make one group.
    """

    section: str
    backend: str
    gpus: int
    apart: int


def gpu_demands(config: ExperimentConfig, machine: Machine) -> tuple[GpuDemand, ...]:
    """One of each section whose processes compute on GPUs; servers of others are none of this machine's."""
    servers, ranks = config.rollout.spec, config.actor.spec.world_size
    found = []
    if _uses_gpu(config.rollout.device, machine) and not config.rollout.servers:
        apart = servers.devices_per_server
        found.append(GpuDemand(section=ROLLOUT, backend=config.rollout.backend, gpus=servers.data * apart, apart=apart))
    if _uses_gpu(config.actor.device, machine):
        found.append(GpuDemand(section=ACTOR, backend=config.actor.backend, gpus=ranks, apart=ranks))
    return tuple(found)


def gpus_wanted(config: ExperimentConfig, machine: Machine) -> int:
    """GPUs the run would use if none were shared."""
    return sum(demand.gpus for demand in gpu_demands(config, machine))


def compute_threads(planned: tuple[PlannedProcess, ...]) -> int:
    """Threads that compute at the same time: those of servers and ranks; the others mostly wait."""
    return sum(p.threads for p in planned if p.role in (INFERENCE, TRAIN))


def _uses_gpu(device: str, machine: Machine) -> bool:
    return device == "cuda" or (device == "auto" and machine.gpus > 0)


def _device(on_gpu: bool, number: int, machine: Machine) -> str:
    return f"cuda:{number % max(1, machine.gpus)}" if on_gpu else "cpu"
