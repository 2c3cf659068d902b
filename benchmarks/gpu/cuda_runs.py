"""The demo on GPUs: does the whole system run there, and what does each placement cost?

    python benchmarks/gpu/cuda_runs.py [--steps 40] [--out FILE]

Runs ``configs/guess_cpu.yaml`` with servers and train ranks on CUDA: both pools on one GPU; on two GPUs, where there
are two, with weights through shared memory and through NCCL, and with two FSDP2 ranks; and once on two CPU cores for
comparison. The model is tiny: readings show that the roads work and what they cost at rest, not how fast a GPU is.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.demo_runs import leave_on_signals, run_demo, write_result
from benchmarks.gpu.refusals import check_out

#: name -> (GPUs needed, overrides)
PLACEMENTS: Mapping[str, tuple[int, Sequence[str]]] = {
    "one GPU, shm": (1, ["rollout.device=cuda", "actor.device=cuda"]),
    "one GPU, recompute, disk": (
        1,
        ["rollout.device=cuda", "actor.device=cuda", "rollout.interrupt=recompute", "weights.transport=disk"],
    ),
    "one GPU, packed bfloat16": (
        1,
        ["rollout.device=cuda", "actor.device=cuda", "actor.mb_spec.packing=packed", "model.dtype=bfloat16"],
    ),
    "two GPUs, shm": (2, ["rollout.device=cuda", "actor.device=cuda"]),
    "two GPUs, collective": (2, ["rollout.device=cuda", "actor.device=cuda", "weights.transport=collective"]),
    "two GPUs, two ranks": (2, ["rollout.device=cuda", "actor.device=cuda", "actor.backend=fsdp:d2"]),
    "two CPU cores": (0, ["rollout.device=cpu", "actor.device=cpu"]),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, help="JSON file for the result; default: it is only printed")
    arguments = parser.parse_args()
    check_out(parser, arguments.out)
    leave_on_signals()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (needed, overrides) in PLACEMENTS.items():
            if needed > len(gpus):
                rows[name] = "not run: too few GPUs"
                continue
            rows[name] = _row(name, needed, [f"total_train_steps={arguments.steps}", *overrides], Path(folder))
            print(name, rows[name], flush=True)
            if arguments.out is not None:
                write_result(arguments.out, {"benchmark": "cuda_runs", "gpus": gpus, "runs": rows})
    return 0 if all(isinstance(row, dict) or row.startswith("not run") for row in rows.values()) else 1


def _row(name: str, gpus: int, overrides: Sequence[str], folder: Path) -> dict[str, Any] | str:
    if gpus == 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    else:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    cores = os.sched_getaffinity(0)
    if gpus == 0:
        os.sched_setaffinity(0, sorted(cores)[:2])  # children inherit it
    trial = name.replace(" ", "-").replace(",", "")
    try:
        run = run_demo(seed=1, models=folder / "models", runs=folder / "runs", trial=trial, overrides=overrides)
    except subprocess.CalledProcessError:
        log = folder / "runs" / "guess" / trial / "logs"
        tails = [f"{p.name}: {p.read_text()[-1500:]}" for p in sorted(log.glob("*.log"))]
        return "failed\n" + "\n".join(tails)
    finally:
        os.sched_setaffinity(0, cores)
    names = (
        "eval_before", "eval_after", "lag_mean", "lag_max", "interrupted_requests", "multi_version_trajectories",
        "pause_seconds_total", "weight_bytes_total",
    )  # fmt: skip
    steady = run.steps[len(run.steps) // 4 :]
    means = ("step_seconds", "wait_seconds", "update_seconds", "publish_seconds", "tokens_per_second")
    return {
        "wall_seconds": round(run.wall_seconds, 1),
        "steps": len(run.steps),
        **{k: run.summary[k] for k in names},
        **{f"mean_{k}": round(sum(float(s[k]) for s in steady) / len(steady), 5) for k in means},
    }


if __name__ == "__main__":
    sys.exit(main())
