"""The numbers of a plan, worked out by hand."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest
from rich.console import Console

from areal_like.config.experiment import ExperimentConfig
from launcher.devices import Machine
from launcher.plan import batch_arithmetic, render_plan, staleness_plan
from launcher.processes import compute_threads, gpus_wanted, plan_processes

Experiment = Callable[..., ExperimentConfig]


def test_one_step_in_numbers(experiment: Experiment) -> None:
    config = experiment(
        train_dataset={"batch_size": 32},
        gconfig={"n_samples": 8},
        actor={"ppo_n_minibatches": 4, "backend": "fsdp:d2"},
        total_train_steps=100,
    )
    batch = batch_arithmetic(config, rows=800)
    assert (batch.groups, batch.siblings, batch.trajectories) == (32, 8, 256)
    assert (batch.minibatches, batch.groups_per_minibatch, batch.rows_per_minibatch) == (4, 8, 64)
    assert batch.rows_per_rank == 32
    assert batch.optimiser_steps == 400
    assert batch.epochs == 4.0
    assert batch_arithmetic(config, rows=None).epochs is None


@pytest.mark.parametrize(
    ("eta", "concurrent", "steps", "expected"),
    [
        (0, 128, 100, (8, 0, 8, 32)),
        (2, 128, 100, (24, 16, 24, 96)),
        (2, 10, 100, (24, 16, 10, 40)),
        (4, 128, 3, (24, 16, 24, 96)),  # a run of 3 steps never needs more than 3 batches
    ],
)
def test_what_eta_allows(
    experiment: Experiment, eta: int, concurrent: int, steps: int, expected: tuple[int, int, int, int]
) -> None:
    rollout = {"max_head_offpolicyness": eta, "max_concurrent_rollouts": concurrent}
    plan = staleness_plan(experiment(rollout=rollout, total_train_steps=steps))
    assert (plan.slots, plan.ahead, plan.running, plan.episodes) == expected


def test_on_a_cpu_every_process_is_on_the_cpu(experiment: Experiment) -> None:
    config = experiment(
        rollout={"backend": "embedded:d2", "port": 8000, "threads": 3},
        actor={"backend": "fsdp:d2", "threads": 2},
        reward_fn="words_for_checks.accept",
        rewards={"workers": 1},
    )
    planned = plan_processes(config, Machine(cores=8, gpus=0))
    assert [(p.name, p.device, p.threads, p.port) for p in planned] == [
        ("controller-0", "cpu", 1, None),
        ("inference-0", "cpu", 3, 8000),
        ("inference-1", "cpu", 3, 8001),
        ("train-0", "cpu", 2, None),
        ("train-1", "cpu", 2, None),
        ("reward-0", "cpu", 1, None),
    ]
    assert compute_threads(planned) == 10


@pytest.mark.parametrize(
    ("gpus", "devices"),
    [
        (4, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        (2, ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]),
        (1, ["cuda:0", "cuda:0", "cuda:0", "cuda:0"]),
    ],
)
def test_servers_get_the_first_gpus_and_ranks_the_next(experiment: Experiment, gpus: int, devices: list[str]) -> None:
    config = experiment(rollout={"backend": "embedded:d2"}, actor={"backend": "fsdp:d2"})
    machine = Machine(cores=8, gpus=gpus)
    assert [p.device for p in plan_processes(config, machine)[1:]] == devices
    assert gpus_wanted(config, machine) == 4


def test_servers_on_the_cpu_leave_every_gpu_to_the_ranks(experiment: Experiment) -> None:
    config = experiment(rollout={"device": "cpu"}, actor={"backend": "fsdp:d2"})
    assert [p.device for p in plan_processes(config, Machine(cores=8, gpus=2))[1:]] == ["cpu", "cuda:0", "cuda:1"]


def test_the_plan_is_readable(experiment: Experiment) -> None:
    out = io.StringIO()
    config = experiment(rollout={"max_head_offpolicyness": 2, "port": 8123}, reward_fn="words_for_checks.accept")
    Console(file=out, width=140).print(render_plan(config, Machine(cores=2, gpus=0), rows=8))
    text = out.getvalue()
    for part in (
        "words/cpu: 4 processes, 2 compute threads on 2 cores, 0 GPUs",
        "8123",
        "8 groups × 4 siblings = 32 trajectories",
        "10 optimiser steps, 10.00 epochs",
        "every trained token is at most 2 versions old",
        "24 groups between admission and training, 16 of them ahead",
        "24 groups = 96 episodes",
        "torch",
    ):
        assert part in text
    out.truncate(0)
    sync = experiment(rollout={"max_head_offpolicyness": 0})
    Console(file=out, width=140).print(render_plan(sync, Machine(cores=2, gpus=0), rows=None))
    assert "synchronous, on-policy" in out.getvalue()


def told(config: ExperimentConfig, machine: Machine) -> list[str]:
    """The warnings of a plan that is printed on a wide page."""
    console = Console(file=io.StringIO(), width=1000)
    console.print(render_plan(config, machine, rows=None))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    return [line.strip().removeprefix("warning: ") for line in lines if line.startswith("warning: ")]


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        (0, ["rollout.device, actor.device: 'cuda' was asked for, and torch can use no GPU here"]),
        (1, ["the run would use 2 GPUs and 1 are here", "weights.group: nccl needs a GPU for the trainer"]),
        (2, []),
    ],
)
def test_a_plan_for_more_gpus_than_are_here_says_so(experiment: Experiment, gpus: int, said: list[str]) -> None:
    weights = {"transport": "collective", "group": "nccl"}
    config = experiment(rollout={"device": "cuda"}, actor={"device": "cuda"}, weights=weights)
    found = told(config, Machine(cores=8, gpus=gpus))
    assert [warning[: len(start)] for warning, start in zip(found, said, strict=True)] == said


def test_a_plan_names_a_missing_model_and_a_missing_interpreter(experiment: Experiment) -> None:
    machine = Machine(cores=8, gpus=0)
    assert told(experiment(), machine) == []
    rollout = {"backend": "vllm:d1", "python": "nowhere/python"}
    model, python = told(experiment(model={"path": "nowhere/model"}, rollout=rollout), machine)
    assert model.startswith("model.path: nowhere/model does not exist")
    assert python.startswith("rollout.python: nowhere/python cannot be asked for versions")
    (python,) = told(experiment(rollout=rollout | {"python": sys.executable}), machine)
    assert python == f"rollout.python: {sys.executable}: not installed there"
    assert told(experiment(rollout=rollout | {"servers": ["http://a:1"]}), machine) == []


def test_models_beside_the_policy_are_named(experiment: Experiment) -> None:
    config = experiment(actor={"advantage": "gae"}, critic={}, ref={})
    console = Console(file=io.StringIO(), width=200)
    console.print(render_plan(config, Machine(cores=2, gpus=0), 8))
    assert isinstance(console.file, io.StringIO)
    assert "adamw, critic, reference" in console.file.getvalue()
