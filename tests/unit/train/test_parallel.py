"""Two real ranks give what one gives: weights, figures, and decisions to skip."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from train_cases import SCENARIOS

from areal_like.errors import ConfigError
from areal_like.train.parallel import choose_device

RANKS = 2
#: float64: the order of sums; float32: roundings of the gradient, of which AdamW's first step makes up to ± lr
TOLERANCE = {"single_precision": 2e-5}


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory, model_dir, tied_model_dir):
    """Folder with what two processes found."""
    out = tmp_path_factory.mktemp("ranks")
    program = Path(__file__).parent / "rank_program.py"
    arguments = [str(RANKS), f"file://{out}/rendezvous", str(out), str(model_dir), str(tied_model_dir)]
    ranks = [
        subprocess.Popen(
            [sys.executable, program, str(rank), *arguments],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS, errors
    return out


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_two_ranks_equal_one(of_two_ranks, one_rank, model_dir, tied_model_dir, kind, name):
    weights, metrics = SCENARIOS[name](one_rank, tied_model_dir if kind == "tied" else model_dir)
    tolerance = TOLERANCE.get(name, 1e-10)
    for rank in range(RANKS):
        found = np.load(of_two_ranks / f"{kind}-{name}-{rank}.npz")
        assert set(found.files) == set(weights)
        for tensor in weights:
            np.testing.assert_allclose(found[tensor], weights[tensor], rtol=0, atol=tolerance, err_msg=tensor)
        figures = json.loads((of_two_ranks / f"{kind}-{name}-{rank}.json").read_text())
        for figure in metrics.keys() - {m for m in metrics if m.startswith("seconds/")} - {"train/micro_batches"}:
            assert math.isclose(figures[figure], metrics[figure], rel_tol=1e-4, abs_tol=1e-5), figure
        assert figures["train/skipped_minibatches"] == (1 if name == "not_finite_on_one_rank" else 0)


def test_choosing_a_device():
    assert choose_device("cpu", 3) == torch.device("cpu")
    if not torch.cuda.is_available():
        assert choose_device("auto", 0) == torch.device("cpu")
        with pytest.raises(ConfigError, match="no CUDA device"):
            choose_device("cuda", 0)
