"""One update of ours beside plain transformers and beside TRL's GRPO step: the same rows, machine and run, on the CPU.

    python benchmarks/train_step.py [--tokens 2048] [--scale 0.1] [--threads 1] [--out FILE]

Every reading is made in a process of its own, one after the other, so that peak memory is its own. ``hf`` is forward
and backward alone, rows of like length padded together; ``trl`` is GRPO's loss, backward and AdamW in an environment of
its own (make trl), rows padded in the order in which they come; ``ours`` is loss, backward, figures and AdamW, and
``whole`` the decoupled update with its prox pass. On a GPU: benchmarks/gpu/train_step.py.

MFU is against the product rate that torch reaches here with as many threads.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
TRL = ROOT / ".venv-trl" / "bin" / "python"


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


def read(program: str, request: dict[str, Any], threads: int, python: str = sys.executable) -> dict[str, Any]:
    """The last line of the program's output."""
    done = subprocess.run(
        [python, str(FOLDER / program), json.dumps(request)],
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return {"failed": done.stderr[-500:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--tokens", type=int, default=2048, help="of one micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--scale", type=float, default=0.1, help="of the rows' lengths")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    common = {name: getattr(given, name) for name in ("shape", "tokens", "micro_batches", "scale", "repeats")}
    rate = product_rate(given.threads)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": given.threads,
        "product_flops_per_second": rate,
        "readings": {},
    }
    programs: list[tuple[str, str, dict[str, Any], str]] = [
        ("ours", "step_runs.py", {"what": "ours"}, sys.executable),
        ("ours, padded", "step_runs.py", {"what": "ours", "layout": "padded"}, sys.executable),
        ("whole", "step_runs.py", {"what": "ours", "prox": "recompute"}, sys.executable),
        ("hf", "step_runs.py", {"what": "hf"}, sys.executable),
        ("trl", "trl_step.py", {}, str(TRL)),
    ]
    for name, program, changes, python in programs:
        if not Path(python).exists():
            print(f"{name:14} not measured: no {python}; make trl installs it")
            continue
        reading = result["readings"][name] = read(program, common | changes, given.threads, python)
        if "failed" in reading:
            print(f"{name:14} failed: {reading['failed'].splitlines()[-1]}")
            continue
        reading["mfu"] = reading["flops_per_second"] / rate
        print(
            f"{name:14} {reading['tokens_per_second']:9.0f} tok/s  mfu {reading['mfu']:.3f}  "
            f"{reading['peak_gb']:.2f} GB  {reading['seconds']:.2f} s",
            flush=True,
        )
    if given.out:
        given.out.write_text(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
