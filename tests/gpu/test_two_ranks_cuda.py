"""Two FSDP2 ranks on two GPUs, over NCCL, give what one gives: weights, gradient norms, decisions to skip.

The batches, models and scenarios are those of ``tests/unit/train``, where two CPU ranks are held to the same. Ranks are
processes of their own; so is the single one, which they are compared with.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if os.environ.get("AREAL_LIKE_TWO_RANKS_DEVICE", "cuda") == "cuda" and torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA devices", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "train"))

from train_cases import build_model

CASES = Path(__file__).parents[1] / "unit" / "train"
#: "cpu" shows on a machine without GPUs that the test itself works
DEVICE = os.environ.get("AREAL_LIKE_TWO_RANKS_DEVICE", "cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

#: in float64: padded rows, since the attention kernel for packed ones is of lower precision
EXACT = (
    "uneven_rows",
    "a_rank_without_rows",
    "not_finite_on_one_rank",
    "rows_that_nobody_wrote",
    "recomputed_and_offloaded",
    "replayed_processors",
    "critic_and_reference",
    "bounded_by_second_moment",
    "no_rank_has_more_than_one_row",
)
NAMES = (*EXACT, "single_precision", "mixed_precision")
#: weights, absolute. float64: the order of sums. float32: the same, of which AdamW's first step makes up to ± lr (3e-3)
#: where a gradient is nothing but roundings. bfloat16 compute with float32 sums: the gradient norm alone is compared
TOLERANCE = {"single_precision": 1e-4}
EXACT_TOLERANCE = 1e-8
#: relative, of figures such as the gradient norm
FIGURES = {"mixed_precision": 0.05}
EXACT_FIGURES = 1e-4

PROGRAM = """
import json, sys
from pathlib import Path
import numpy as np, torch
from train_cases import SCENARIOS, build_engine, random_batch, weights_of
from areal_like.config.actor import ActorConfig
from areal_like.train import parallel as ranks
from areal_like.train.engine import TrainEngine
from areal_like.train.model import PolicyModel, Sampling, load_language_model
from areal_like.train.ppo import PpoUpdate

rank, world, device, layers, out, folder = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5], *map(Path, sys.argv[5:7])
if layers == "layers":  # these models are so small that they would be sharded as a whole
    ranks.SHARD_LAYERS_ABOVE = ranks.SHARD_WHOLE_LAYERS_ABOVE = 0

def mixed_precision(parallel, folder):
    layout = "packed" if parallel.device.type == "cuda" else "padded"
    actor = ActorConfig.model_validate(
        {"ppo_n_minibatches": 2, "mb_spec": {"packing": layout, "max_tokens_per_mb": 30}, "optimizer": {"lr": 3e-3}}
    )
    model = load_language_model(folder, layout=layout).to(parallel.device)
    policy = PolicyModel(model, Sampling())
    engine = TrainEngine(policy, parallel, actor.optimizer, total_steps=10, compute_dtype=torch.bfloat16)
    batch, rows = random_batch()
    report = PpoUpdate(engine, actor, lambda keys: [rows[key] for key in keys]).run(batch)
    return weights_of(engine), report.metrics

where = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
scenarios = SCENARIOS | {"mixed_precision": mixed_precision}
with ranks.process_group(
    rank=rank, world_size=world, rendezvous=f"file://{out}/rendezvous", device=where, timeout=120
) as parallel:
    for name in sys.argv[7:]:
        weights, metrics = scenarios[name](parallel, folder)
        np.savez(out / f"{name}-{rank}.npz", **weights)
        (out / f"{name}-{rank}.json").write_text(json.dumps(metrics))
"""


def run(world: int, layers: str, out: Path, folder: Path, names: Sequence[str]) -> Path:
    """``names`` on ``world`` ranks; ``out`` then holds what each rank found."""
    out.mkdir()
    paths = os.pathsep.join([str(CASES), str(CASES.parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    logs = [out / f"log-{rank}" for rank in range(world)]
    processes = []
    for rank, log in enumerate(logs):
        arguments = [str(rank), str(world), DEVICE, layers, str(out), str(folder), *names]
        with log.open("w") as stderr:
            command = [sys.executable, "-c", PROGRAM, *arguments]
            processes.append(subprocess.Popen(command, env=environment, stdout=stderr, stderr=stderr))
    try:
        codes = [process.wait(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * world, "\n".join(log.read_text()[-2000:] for log in logs)
    return out


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("one")
    build_model(base / "llama", tied=True)
    return run(1, "whole", base / "out", base / "llama", NAMES)


@pytest.fixture(scope="module", params=["whole", "layers"])
def two(one: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The model gathered as a whole, and layer by layer."""
    return run(2, request.param, tmp_path_factory.mktemp("two") / "out", one.parent / "llama", NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_equal_one(one: Path, two: Path, name: str) -> None:
    expected, figures = found(one, name, 0)
    for rank in range(2):
        weights, metrics = found(two, name, rank)
        assert set(weights) == set(expected)
        if name != "mixed_precision":
            for tensor, value in expected.items():
                tolerance = TOLERANCE.get(name, EXACT_TOLERANCE)
                np.testing.assert_allclose(weights[tensor], value, rtol=0, atol=tolerance, err_msg=tensor)
        relative = FIGURES.get(name, EXACT_FIGURES)
        compared = ("train/grad_norm",) if name == "mixed_precision" else compared_figures(figures)
        for figure in compared:
            assert math.isclose(metrics[figure], figures[figure], rel_tol=relative, abs_tol=1e-5), figure
        assert metrics["train/skipped_minibatches"] == (1 if name == "not_finite_on_one_rank" else 0)


def compared_figures(figures: dict[str, float]) -> list[str]:
    """All but times, and the number of micro-batches, which depends on the number of ranks."""
    return [name for name in figures if not name.startswith("seconds/") and name != "train/micro_batches"]


def found(folder: Path, name: str, rank: int) -> tuple[Any, dict[str, float]]:
    return dict(np.load(folder / f"{name}-{rank}.npz")), json.loads((folder / f"{name}-{rank}.json").read_text())


def test_both_ranks_hold_the_same(two: Path) -> None:
    for name in NAMES:
        first, second = found(two, name, 0)[0], found(two, name, 1)[0]
        for tensor in first:
            np.testing.assert_array_equal(first[tensor], second[tensor], err_msg=f"{name}: {tensor}")
