"""Who must share a GPU, and who must not, told before a process starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from areal_like.config.experiment import ExperimentConfig
from areal_like.errors import ConfigError
from launcher.devices import Machine
from launcher.transport_checks import check_collective, check_ipc

Experiment = Callable[..., ExperimentConfig]
ONE, TWO, THREE = (Machine(cores=8, gpus=gpus) for gpus in (1, 2, 3))
IPC = {"transport": "ipc"}
NCCL = {"transport": "collective", "group": "nccl"}


def test_ipc_is_for_one_gpu_that_all_share(experiment: Experiment) -> None:
    check_ipc(experiment(weights=IPC), ONE)
    with pytest.raises(ConfigError, match=r"train rank 0 is on cuda:1 and servers would be on cuda:0"):
        check_ipc(experiment(weights=IPC), TWO)
    with pytest.raises(ConfigError, match="the trainer is on the CPU"):
        check_ipc(experiment(weights=IPC), Machine(cores=8, gpus=0))


def test_ipc_stays_on_loopback(experiment: Experiment) -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0 is none"):
        check_ipc(experiment(weights=IPC, rollout={"host": "0.0.0.0"}), ONE)
    near: dict[str, Any] = {"servers": ["http://127.0.0.1:8000"]}
    far: dict[str, Any] = {"servers": ["http://10.0.0.7:8000"]}
    check_ipc(experiment(weights=IPC, rollout=near), ONE)
    with pytest.raises(ConfigError, match=r"10\.0\.0\.7 is none"):
        check_ipc(experiment(weights=IPC, rollout=far), ONE)


def test_ipc_is_not_for_sglang(experiment: Experiment) -> None:
    with pytest.raises(ConfigError, match="only as pickles"):
        check_ipc(experiment(weights=IPC, rollout={"backend": "sglang:d1"}), ONE)


def test_other_transports_are_not_asked(experiment: Experiment) -> None:
    for weights in ({"transport": "shm"}, {"transport": "disk"}, {"transport": "collective", "group": "gloo"}):
        check_ipc(experiment(weights=weights), TWO)
        check_collective(experiment(weights=weights), ONE)


def test_nccl_wants_a_gpu_for_each_member_and_says_what_to_use_instead(experiment: Experiment) -> None:
    check_collective(experiment(weights=NCCL), TWO)
    check_collective(experiment(weights=NCCL, rollout={"backend": "embedded:d2"}), THREE)
    with pytest.raises(ConfigError, match=r"cuda:0 would have several members.*weights.transport=ipc"):
        check_collective(experiment(weights=NCCL), ONE)
    with pytest.raises(ConfigError, match=r"would have several members.*weights.group=gloo"):
        check_collective(experiment(weights=NCCL, rollout={"backend": "embedded:d2"}), TWO)
    with pytest.raises(ConfigError, match=r"for each server \(cpu\); use weights.group=gloo"):
        check_collective(experiment(weights=NCCL), Machine(cores=8, gpus=0))


def test_what_auto_means_is_told_where_it_was_auto(experiment: Experiment) -> None:
    for group, said in (("nccl", "weights.group: nccl needs"), ("auto", "weights.group: auto means nccl here, which")):
        with pytest.raises(ConfigError, match=f"^{said}.* a GPU for the trainer"):
            check_collective(experiment(weights={"transport": "collective", "group": group}), ONE)
