"""Too few GPUs, told before a process starts, and before what follows from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_like.config.experiment import ExperimentConfig
from areal_like.config.load import load_config
from areal_like.errors import ConfigError
from launcher.checks import check_experiment
from launcher.devices import Machine
from launcher.gpu_checks import check_devices, check_gpus, gpu_warnings
from launcher.processes import ROLLOUT

Experiment = Callable[..., ExperimentConfig]
CONFIGS = Path(__file__).parents[3] / "configs"
NONE, ONE, TWO, FOUR = (Machine(cores=8, gpus=gpus) for gpus in (0, 1, 2, 4))
CUDA = {"rollout": {"device": "cuda"}, "actor": {"device": "cuda"}}


def refusal(config: ExperimentConfig, machine: Machine) -> str:
    with pytest.raises(ConfigError) as caught:
        check_devices(config, machine)
    return str(caught.value)


@pytest.mark.parametrize(
    "weights",
    [{"transport": "collective", "group": "nccl"}, {"transport": "collective"}, {"transport": "ipc"}, {}],
)
def test_without_a_gpu_that_is_told_and_nothing_that_follows_from_it(
    experiment: Experiment, weights: dict[str, Any]
) -> None:
    config = experiment(weights=weights, rollout={"device": "cuda", "backend": "embedded:d3"}, actor=CUDA["actor"])
    said = refusal(config, NONE)
    assert said.startswith("rollout.device, actor.device: 'cuda' was asked for, and torch can use no GPU here")
    assert "(wanted: 3 by rollout.backend=embedded:d3, 1 by actor.backend=fsdp:d1; here: 0)" in said
    with pytest.raises(ConfigError) as caught:
        check_experiment(config, machine=NONE)
    assert str(caught.value) == said


def test_only_the_keys_that_ask_for_gpus_are_named(experiment: Experiment) -> None:
    for section in ("rollout", "actor"):
        assert refusal(experiment(**{section: {"device": "cuda"}}), NONE).startswith(f"{section}.device: 'cuda'")
    check_devices(experiment(), NONE)
    check_devices(experiment(rollout={"device": "cuda", "servers": ["http://a:1"]}), NONE)  # they may be elsewhere


def test_a_newcomers_first_fault_of_a_recipe_for_gpus_is_the_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No model, no environment, no dataset either: each is told with what makes it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        check_experiment(load_config(str(CONFIGS / "smollm2_arithmetic_2gpu.yaml"), []), machine=NONE)
    _, gpus, python, model, *others = str(caught.value).splitlines()
    assert "torch can use no GPU here (wanted: 1 by rollout.backend=vllm:d1, 1 by actor.backend=fsdp:d1" in gpus
    assert "rollout.python: .venv-vllm-gpu/bin/python cannot be asked" in python and "docs/engines.md" in python
    assert "make engines" not in python
    assert "model.path: models/smollm2 does not exist" in model and "`make smollm2` makes it" in model
    assert not any("nccl" in fault for fault in others)


def test_a_group_that_needs_more_gpus_than_are_here_is_refused(experiment: Experiment) -> None:
    servers = experiment(rollout={"backend": "vllm:d2t4", "python": "p"}, actor={"device": "cpu"})
    assert refusal(servers, TWO).startswith("rollout.backend: vllm:d2t4 needs 4 GPUs for each server")
    assert "and 2 are here" in refusal(servers, TWO)
    check_devices(servers, FOUR)  # two servers share them
    ranks = experiment(rollout={"device": "cpu"}, actor={"backend": "fsdp:d2"})
    assert refusal(ranks, ONE).startswith("actor.backend: fsdp:d2 needs 2 GPUs for the ranks")
    check_devices(ranks, TWO)


def test_one_server_alone_asks_nothing_of_the_trainers_gpus(experiment: Experiment) -> None:
    config = experiment(actor={"backend": "fsdp:d8", "device": "cuda"})
    for machine in (NONE, ONE):
        check_gpus(config, machine, sections=(ROLLOUT,))
        with pytest.raises(ConfigError, match=r"^actor\."):
            check_gpus(config, machine)


def test_groups_that_can_share_gpus_are_warned_of(experiment: Experiment) -> None:
    config = experiment(**CUDA)
    check_devices(config, ONE)
    assert gpu_warnings(config, ONE) == ["the run would use 2 GPUs and 1 are here: some processes share one"]
    assert gpu_warnings(config, TWO) == []
