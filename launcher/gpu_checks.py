"""Rules of the GPUs that an experiment asks for: are there enough, and who may share one."""

from __future__ import annotations

from collections.abc import Collection

from areal_like.config.experiment import ExperimentConfig
from areal_like.errors import ConfigError
from launcher.devices import Machine
from launcher.processes import ACTOR, ROLLOUT, gpu_demands, gpus_wanted
from launcher.transport_checks import check_collective, check_ipc


def check_devices(config: ExperimentConfig, machine: Machine) -> None:
    """The GPUs are there, and processes share them only where the transport lets them.

    Raises:
        ConfigError: one fault. Too few GPUs come first, and alone: whatever else is wrong follows from that.
    """
    check_gpus(config, machine)
    check_collective(config, machine)
    check_ipc(config, machine)


def check_gpus(config: ExperimentConfig, machine: Machine, *, sections: Collection[str] = (ROLLOUT, ACTOR)) -> None:
    """There is a GPU if any is asked for, and one for each process of a group that cannot share them.

    Args:
        sections: those of the experiment whose processes this machine is to run.

    Raises:
        ConfigError: there are too few; names the keys that ask for them, how many they ask for, and how many are here.
    """
    asked = [demand for demand in gpu_demands(config, machine) if demand.section in sections]
    if asked and machine.gpus == 0:
        keys = ", ".join(f"{demand.section}.device" for demand in asked)
        counts = ", ".join(f"{demand.gpus} by {demand.section}.backend={demand.backend}" for demand in asked)
        raise ConfigError(
            f"{keys}: 'cuda' was asked for, and torch can use no GPU here (wanted: {counts}; here: 0); use a machine "
            "with GPUs, or auto or cpu"
        )
    for demand in asked:
        if demand.apart > machine.gpus:
            whose = "each server" if demand.section == ROLLOUT else "the ranks"
            raise ConfigError(
                f"{demand.section}.backend: {demand.backend} needs {demand.apart} GPUs for {whose}, which cannot share "
                f"one (NCCL: duplicate GPU), and {machine.gpus} are here; lower its sizes, or use a machine with more"
            )


def gpu_warnings(config: ExperimentConfig, machine: Machine) -> list[str]:
    """Fewer GPUs than processes that compute on one, which works where they fit into one."""
    wanted = gpus_wanted(config, machine)
    if wanted > machine.gpus > 0:
        return [f"the run would use {wanted} GPUs and {machine.gpus} are here: some processes share one"]
    return []
