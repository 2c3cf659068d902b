"""One update of ours beside plain transformers and beside TRL's GRPO step: the same rows, machine and run, on the CPU.

    python benchmarks/train_step.py [--shapes tiny small] [--tokens 2048] [--threads 1] [--out FILE]

Every reading is made in a process of its own, one after the other. ``ours`` is loss, backward, figures and AdamW, and
``whole`` the decoupled update with its prox pass; ``hf`` is forward and backward alone, and ``hf step`` has AdamW, rows
of like length padded together; ``trl`` is GRPO's loss, backward and AdamW in an environment of its own (make trl), rows
padded in the order in which they come. On a GPU: benchmarks/gpu/train_step.py.

MFU is against the product rate that torch reaches here with as many threads. Memory is that of all tensors at the peak
of a step, and what of it lies above weights, gradients and optimiser state.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
sys.path[:0] = [str(FOLDER), str(ROOT)]

from demo_runs import bound  # noqa: E402
from step_shapes import SHAPES  # noqa: E402

TRL = ROOT / ".venv-trl" / "bin" / "python"

#: name -> (program, what it is asked beside what all are, interpreter)
READINGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "ours": ("step_runs.py", {"what": "ours"}, sys.executable),
    "ours, padded": ("step_runs.py", {"what": "ours", "layout": "padded"}, sys.executable),
    "whole": ("step_runs.py", {"what": "ours", "prox": "recompute"}, sys.executable),
    "hf": ("step_runs.py", {"what": "hf"}, sys.executable),
    "hf step": ("step_runs.py", {"what": "hf-step"}, sys.executable),
    "trl": ("trl_step.py", {}, str(TRL)),
}


def product_rate(threads: int, size: int = 1024, repeats: int = 7) -> float:
    """FLOP/s of one float32 product, median."""
    torch.set_num_threads(threads)
    a, b = torch.randn(size, size), torch.randn(size, size)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - started)
    return 2 * size**3 / sorted(times)[repeats // 2]


def read(program: str, request: dict[str, Any], threads: int, python: str) -> dict[str, Any]:
    """The last line of the program's output."""
    if not Path(python).exists():
        return {"failed": f"no {python}; make trl installs it"}
    done = subprocess.run(
        bound([python, str(FOLDER / program), json.dumps(request)]),
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return {"failed": done.stderr[-500:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def readings(given: argparse.Namespace, rate: float) -> Iterator[dict[str, Any]]:
    for shape in given.shapes:
        common = {name: getattr(given, name) for name in ("tokens", "micro_batches", "scale", "repeats")}
        for name, (program, changes, python) in READINGS.items():
            answer = read(program, common | {"shape": shape} | changes, given.threads, python)
            answer |= {"name": name, "shape": shape}
            if "failed" not in answer:
                answer["mfu"] = answer["flops_per_second"] / rate
            yield answer


def line_of(answer: dict[str, Any]) -> str:
    name = f"{answer['shape']:6} {answer['name']:14}"
    if "failed" in answer:
        return f"{name} failed: {answer['failed'].splitlines()[-1]}"
    memory = f"{answer['peak_gb'] * 1e3:6.0f} MB ({answer['above_resident_gb'] * 1e3:.0f} above)"
    speed = f"{answer['tokens_per_second']:9.0f} tok/s  mfu {answer['mfu']:.3f}"
    return f"{name} {speed}  {memory}  {answer['seconds']:.2f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["tiny", "small"], choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=2048, help="of one micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--scale", type=float, default=0.1, help="of the rows' lengths")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file for the result; default: it is only printed")
    given = parser.parse_args()
    rate = product_rate(given.threads)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "threads": given.threads,
        "product_flops_per_second": rate,
        "readings": [],
    }
    for answer in readings(given, rate):
        result["readings"].append(answer)
        print(line_of(answer), flush=True)
        if given.out is not None:
            given.out.write_text(json.dumps(result, indent=2))
    return 1 if any("failed" in answer for answer in result["readings"]) else 0


if __name__ == "__main__":
    sys.exit(main())
