"""Critic, reference and M2PO on CUDA give what they give on a CPU; they and supervised steps run on packed rows."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "train"))

from train_cases import SCENARIOS, build_model, random_batch, run_update, weights_of

from areal_like.api.generation import GenerationHyperparameters
from areal_like.config.actor import ActorConfig
from areal_like.config.critic import CriticConfig
from areal_like.config.model import ModelConfig
from areal_like.config.reference import ReferenceConfig
from areal_like.config.weights import WeightsConfig
from areal_like.train.companions import build_companions
from areal_like.train.engine import TrainEngine
from areal_like.train.model import PolicyModel, load_language_model, replayed_sampling
from areal_like.train.parallel import Parallel, process_group
from areal_like.train.spec import TrainWorkerSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # read by the compiler
]

CASES = Path(__file__).parents[1] / "unit" / "train"

#: float64, but rotary embeddings come from float32 angles whatever the model's dtype, and those differ by device
TOLERANCE = 1e-6
#: padded rows, or float64 ones row after row: the attention kernel is of lower precision
NAMES = ("critic_and_reference", "bounded_by_second_moment", "adapters", "adapters_with_critic_and_reference")
PROGRAM = """
import sys, json, numpy as np, torch
from pathlib import Path
from train_cases import SCENARIOS
from areal_like.train.parallel import process_group
out, folder = Path(sys.argv[1]), Path(sys.argv[2])
rendezvous = f"file://{out}/rendezvous"
with process_group(rank=0, world_size=1, rendezvous=rendezvous, device=torch.device("cpu"), timeout=60) as parallel:
    for name in sys.argv[3:]:
        weights, metrics = SCENARIOS[name](parallel, folder)
        np.savez(out / f"{name}.npz", **weights)
        (out / f"{name}.json").write_text(json.dumps(metrics))
"""


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parallel]:
    rendezvous = f"file://{tmp_path_factory.mktemp('rendezvous') / 'file'}"
    device = torch.device("cuda", 0)
    with process_group(rank=0, world_size=1, rendezvous=rendezvous, device=device, timeout=60) as parallel:
        yield parallel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    out = tmp_path_factory.mktemp("cpu")
    paths = os.pathsep.join([str(CASES), str(CASES.parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", PROGRAM, str(out), str(folder), *filter(_can_run, NAMES)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": paths})
    return out


def _can_run(name: str) -> bool:
    """Adapters need PEFT."""
    return not name.startswith("adapters") or importlib.util.find_spec("peft") is not None


@pytest.mark.parametrize("name", NAMES)
def test_cuda_equals_the_cpu(name: str, folder: Path, one_rank: Parallel, on_cpu: Path) -> None:
    if not _can_run(name):
        pytest.skip("needs PEFT")
    weights, metrics = SCENARIOS[name](one_rank, folder)
    expected = np.load(on_cpu / f"{name}.npz")
    assert set(expected.files) == set(weights)
    for tensor in weights:
        np.testing.assert_allclose(weights[tensor], expected[tensor], rtol=0, atol=TOLERANCE, err_msg=tensor)
    figures = json.loads((on_cpu / f"{name}.json").read_text())
    for figure in figures.keys() - {m for m in figures if m.startswith("seconds/")}:
        assert metrics[figure] == pytest.approx(figures[figure], rel=1e-5, abs=1e-6), figure


@pytest.mark.parametrize("name", ["kl_off_a_groups_rewards", "supervised"])
def test_packed_rows_run(name: str, folder: Path, one_rank: Parallel) -> None:
    weights, metrics = SCENARIOS[name](one_rank, folder)
    assert all(np.isfinite(tensor).all() for tensor in weights.values())
    assert metrics["train/skipped_minibatches"] == 0


@pytest.mark.parametrize("offload", [False, True])
def test_compiled_bfloat16_companions_run(folder: Path, one_rank: Parallel, tmp_path: Path, offload: bool) -> None:
    actor = ActorConfig.model_validate(
        {
            "advantage": "gae",
            "optimizer": {"lr": 1e-3},
            "mb_spec": {"packing": "packed"},
            "compile": True,
            "offload_optimizer": offload,
        }
    )
    spec = TrainWorkerSpec(
        rank=0,
        world_size=1,
        rendezvous="file:///nowhere",
        model=ModelConfig(path=str(folder), dtype="bfloat16"),
        actor=actor,
        critic=CriticConfig.model_validate({"optimizer": {"lr": 1e-3}}),
        ref=ReferenceConfig(kl_coef=0.1),
        gconfig=GenerationHyperparameters(),
        weights=WeightsConfig(),
        store_address="ipc:///nowhere",
        bind="ipc:///nowhere",
        run_dir=tmp_path,
        run_id="test",
        total_train_steps=4,
    )
    model = load_language_model(folder, layout="packed", compiled=True).to(one_rank.device)
    policy = PolicyModel(model, replayed_sampling(spec.gconfig, model))
    engine = TrainEngine(
        policy, one_rank, actor.optimizer, total_steps=4, compute_dtype=torch.bfloat16, offload=offload
    )
    companions = build_companions(spec, one_rank)
    assert companions.critic is not None
    before = weights_of(companions.critic.engine)
    metrics = [run_update(engine, actor, *random_batch(seed=seed), companions).metrics for seed in (0, 1)]
    # the same weights; with and without gradients, the compiler rounds at other places
    assert metrics[0]["ref/kl_k3"] == pytest.approx(0.0, abs=5e-3)
    assert all(np.isfinite(value) for value in metrics[1].values())
    assert any((before[name] != tensor).any() for name, tensor in weights_of(companions.critic.engine).items())
