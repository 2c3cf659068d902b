"""Real ranks give what one gives: gradients, weights, figures, decisions to skip; and read each other's snapshots."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from train_cases import SCENARIOS, cases, snapshot_read, snapshot_written

from areal_like.errors import ConfigError
from areal_like.train.parallel import choose_device, process_group

pytestmark = pytest.mark.timeout(400)  # the first test waits for seven processes' imports

#: ranks, and how many of them share one copy of the model: all of two; two of four (HSDP)
RANKS = {"two": (2, 2), "two_times_two": (4, 2)}
#: float64: the order of sums; float32: roundings of the gradient, of which AdamW's first step makes up to ± lr
TOLERANCE = {"single_precision": 2e-5}

#: figures that depend on how many ranks there are, and on the machine
BY_PLACE = ("seconds/", "balance/", "train/micro_batches")


def run_ranks(ranks, shard_size, out, *folders):
    program = Path(__file__).parent / "rank_program.py"
    out.mkdir()
    arguments = [ranks, shard_size, f"file://{out}/rendezvous", out, *folders]
    logs = [out / f"log-{rank}" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        command = [sys.executable, program, str(rank), *map(str, arguments)]
        with log.open("w") as stderr:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            processes.append(subprocess.Popen(command, env=environment, stdout=stderr, stderr=stderr))
    try:
        codes = [process.wait(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * ranks, "\n".join(log.read_text()[-2000:] for log in logs)


@pytest.fixture(scope="module")
def found_by_ranks(tmp_path_factory, model_dir, tied_model_dir):
    """Folders with what two and four processes found, by the names of :data:`RANKS`; four read what two wrote."""
    out = tmp_path_factory.mktemp("ranks")
    run_ranks(*RANKS["two"], out / "two", model_dir, tied_model_dir)
    run_ranks(*RANKS["two_times_two"], out / "two_times_two", model_dir, tied_model_dir, out / "two" / "snapshots")
    return out


def assert_equal_weights(found, weights, tolerance=1e-10):
    assert set(found.files) == set(weights)
    for tensor in weights:
        np.testing.assert_allclose(found[tensor], weights[tensor], rtol=0, atol=tolerance, err_msg=tensor)


@pytest.mark.parametrize(("kind", "name"), cases(ranks=2))
def test_several_ranks_equal_one(found_by_ranks, one_rank, model_dir, tied_model_dir, kind, name):
    weights, metrics = SCENARIOS[name](one_rank, tied_model_dir if kind == "tied" else model_dir)
    for folder, (ranks, _) in RANKS.items():
        for rank in range(ranks) if (kind, name) in cases(ranks) else ():
            out = found_by_ranks / folder / f"{kind}-{name}-{rank}"
            assert_equal_weights(np.load(out.with_suffix(".npz")), weights, TOLERANCE.get(name, 1e-10))
            figures = json.loads(out.with_suffix(".json").read_text())
            for figure in metrics.keys() - {m for m in metrics if m.startswith(BY_PLACE)}:
                assert math.isclose(figures[figure], metrics[figure], rel_tol=1e-4, abs_tol=1e-5), figure
            assert figures["train/skipped_minibatches"] == (1 if name == "not_finite_on_one_rank" else 0)


def test_ranks_learn_the_same_cost_of_rows(found_by_ranks):
    for folder, (ranks, _) in RANKS.items():
        paths = [found_by_ranks / folder / f"tied-balanced_by_measured_seconds-{rank}.json" for rank in range(ranks)]
        learnt = [
            {name: value for name, value in json.loads(path.read_text()).items() if name.startswith("balance/")}
            for path in paths
        ]
        assert len(learnt[0]) == 3 and all(figures == learnt[0] for figures in learnt)
        # 3e-5 seconds a pair were made up; counted operations alone would say that pairs cost next to nothing
        assert 2e4 < learnt[0]["balance/us_per_1k_token_pairs"] < 4e4


def test_a_snapshot_is_read_by_another_number_of_ranks(found_by_ranks, one_rank, tied_model_dir, tmp_path):
    weights = snapshot_written(one_rank, tied_model_dir, tmp_path)
    for folder, (ranks, _) in RANKS.items():
        for rank in range(ranks):
            assert_equal_weights(np.load(found_by_ranks / folder / f"written-{rank}.npz"), weights)
        read = snapshot_read(one_rank, tied_model_dir, found_by_ranks / folder / "snapshots")
        for name in weights:
            np.testing.assert_allclose(read[name], weights[name], rtol=0, atol=1e-10, err_msg=name)
    for rank in range(RANKS["two_times_two"][0]):
        assert_equal_weights(np.load(found_by_ranks / "two_times_two" / f"read-{rank}.npz"), weights)


def test_copies_of_unequal_size_are_refused(tmp_path):
    with (
        pytest.raises(ConfigError, match="2 does not divide the 3 ranks"),
        process_group(
            rank=0,
            world_size=3,
            rendezvous=f"file://{tmp_path}/r",
            device=torch.device("cpu"),
            timeout=1,
            shard_size=2,
        ),
    ):
        pass


def test_choosing_a_device():
    assert choose_device("cpu", 3) == torch.device("cpu")
    if not torch.cuda.is_available():
        assert choose_device("auto", 0) == torch.device("cpu")
        with pytest.raises(ConfigError, match="no CUDA device"):
            choose_device("cuda", 0)
