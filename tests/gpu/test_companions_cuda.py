"""Critic, reference and M2PO on CUDA give what they give on a CPU; they and supervised steps run on packed rows."""

from __future__ import annotations

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

from train_cases import SCENARIOS, build_model

from areal_like.train.parallel import Parallel, process_group

pytestmark = pytest.mark.gpu

CASES = Path(__file__).parents[1] / "unit" / "train"

#: float64, but rotary embeddings come from float32 angles whatever the model's dtype, and those differ by device
TOLERANCE = 1e-6
#: padded rows: packed ones need the attention kernel, which is of lower precision
NAMES = ("critic_and_reference", "bounded_by_second_moment")
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
    command = [sys.executable, "-c", PROGRAM, str(out), str(folder), *NAMES]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": paths})
    return out


@pytest.mark.parametrize("name", NAMES)
def test_cuda_equals_the_cpu(name: str, folder: Path, one_rank: Parallel, on_cpu: Path) -> None:
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
