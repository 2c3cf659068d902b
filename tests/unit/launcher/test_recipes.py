"""The recipes for GPUs, checked and planned as on the machine that they are for."""

from __future__ import annotations

import io
import json
import re
import stat
from pathlib import Path

import pytest
from rich.console import Console

from areal_like.config.experiment import ExperimentConfig
from areal_like.config.load import load_config
from areal_like.inference.backends import get_engine
from launcher.checks import check_experiment
from launcher.devices import Machine
from launcher.engines import engine_spec
from launcher.plan import render_plan
from launcher.processes import INFERENCE, TRAIN, gpus_wanted, plan_processes
from tests.unit.launcher.conftest import write_model

RECIPES = sorted((Path(__file__).parents[3] / "configs").glob("*_*gpu.yaml"))
ROW = {"prompt": "a a", "answer": "1"}


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter whose environment has both engines, and us."""
    path = tmp_path / "python"
    path.write_text(
        '#!/bin/sh\nfor word in "$@"; do\n  case "$word" in\n'
        "    vllm) echo 0.33.0; exit;; sglang) echo 0.5.23; exit;; areal-like) echo 0.1; exit;;\n  esac\ndone\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture(params=RECIPES, ids=[path.stem for path in RECIPES])
def recipe(request: pytest.FixtureRequest, tmp_path: Path, python: str) -> tuple[ExperimentConfig, Machine]:
    """With a model and a dataset at its paths, and the machine that its name tells of."""
    model = write_model(tmp_path / "model", context=8192)
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(ROW) + "\n" for _ in range(256)))
    paths = [f"model.path={model}", f"train_dataset.path={data}", f"rollout.python={python}"]
    if load_config(request.param, []).valid_dataset is not None:
        paths.append(f"valid_dataset.path={data}")
    config = load_config(request.param, paths)
    found = re.search(r"_(\d+)gpu$", request.param.stem)
    assert found is not None
    return config, Machine(cores=16 * int(found[1]), gpus=int(found[1]))


def test_there_is_one_for_each_engine_and_size() -> None:
    names = {path.stem for path in RECIPES}
    assert {f"{engine}_{gpus}gpu" for engine in ("vllm", "sglang") for gpus in (1, 8)} <= names
    assert {"smollm2_arithmetic_1gpu", "smollm2_arithmetic_2gpu"} <= names


def test_a_recipe_passes_every_check(recipe: tuple[ExperimentConfig, Machine]) -> None:
    config, machine = recipe
    check_experiment(config, run_directory=False, machine=machine)


def test_every_gpu_is_used_and_shared_only_where_there_is_one(recipe: tuple[ExperimentConfig, Machine]) -> None:
    config, machine = recipe
    planned = plan_processes(config, machine)
    used = [device for process in planned if process.role in (INFERENCE, TRAIN) for device in process.devices]
    assert set(used) == {f"cuda:{number}" for number in range(machine.gpus)}
    assert gpus_wanted(config, machine) == len(used)
    if machine.gpus > 1:
        assert len(used) == machine.gpus


def test_a_recipe_is_planned_and_its_servers_can_be_started(recipe: tuple[ExperimentConfig, Machine]) -> None:
    config, machine = recipe
    console = Console(file=io.StringIO(), width=120)
    console.print(render_plan(config, machine, rows=256))
    assert "cuda:0" in console.file.getvalue()  # type: ignore[attr-defined]
    for process in plan_processes(config, machine):
        if process.role == INFERENCE:
            command = get_engine(config.rollout.spec.name).command(engine_spec(config, process), token="t")
            gpus = ",".join(device.partition(":")[2] for device in process.devices)
            assert command.environment["CUDA_VISIBLE_DEVICES"] == gpus
