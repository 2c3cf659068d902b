"""The same update on one rank and on two FSDP2 ranks of one host, each with the same work: MFU of both.

    python benchmarks/gpu/train_step_ranks.py [--ranks 1 2] [--shapes 1.5b] [--seconds 200] [--out FILE]

Readings, shapes and MFU are those of train_step.py; two ranks share twice the rows. For the 7B shape one rank drops its
gradients, since AdamW's moments do not fit on one device; two ranks also make the whole step. ``--quick`` runs the tiny
shape, on CPUs and over gloo where there are no GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
sys.path[:0] = [str(BENCHMARKS), str(ROOT)]

from demo_runs import bound, leave_on_signals, write_result  # noqa: E402
from step_runs import Request, measure  # noqa: E402
from step_shapes import SHAPES  # noqa: E402

from areal_like.train.parallel import Parallel, process_group  # noqa: E402
from benchmarks.gpu.refusals import check_limits  # noqa: E402

#: rows of one rank: micro-batches of this many tokens
TOKENS = {"tiny": 1024, "7b": 8192}
MICRO_BATCHES = 4
#: seconds that ranks may take beyond their time: the reading that they are in
_LAST_READING = 120.0
_SHOWN = ("mfu", "tokens_per_second", "peak_gb", "exit_codes")


def requests(shape: str, ranks: int, device: str) -> dict[str, Request]:
    """Named readings."""
    tokens = TOKENS.get(shape, 16384)
    common: dict[str, Any] = {
        "shape": shape,
        "device": device,
        "tokens": tokens,
        "micro_batches": MICRO_BATCHES * ranks,
        "dtype": "bfloat16" if device == "cuda" else "float32",
        "compile": device == "cuda",
        "layout": "packed" if device == "cuda" else "padded",
    }
    if shape == "7b":
        common |= {"budget": 14000, "minibatches": 4}
        without = {"mixed rows, without the optimiser": Request(**common, optimizer=False)}
        return without | ({"mixed rows": Request(**common)} if ranks > 1 else {})
    return {"mixed rows": Request(**common), "even rows": Request(**common, lengths="even")}


def child(rank: int, ranks: int, meeting: str, shape: str, seconds: float) -> None:
    """One rank. Rank 0 prints a line of JSON for every reading."""
    end = time.monotonic() + seconds
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    with process_group(
        rank=rank, world_size=ranks, rendezvous=f"file://{meeting}", device=device, timeout=120
    ) as parallel:
        for name, request in requests(shape, ranks, device.type).items():
            if _over(parallel, end):
                break
            found = measure(request, parallel)
            if rank == 0:
                print(json.dumps({"name": name, "ranks": ranks} | found), flush=True)
            torch._dynamo.reset()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        _over(parallel, end)  # nobody leaves while another still sends


def _over(parallel: Parallel, end: float) -> bool:
    """All ranks stop together."""
    over = torch.tensor([float(time.monotonic() > end)], device=parallel.device)
    return bool(parallel.max(over).item())


def readings_of(shape: str, ranks: int, seconds: float) -> list[dict[str, Any]]:
    """Of processes of their own. What failed is a reading, too."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", f"{folder}/meeting", "--shapes", shape]
        environment = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        processes = [
            subprocess.Popen(
                bound([*command, "--ranks", str(rank), str(ranks), "--seconds", str(seconds)]),
                stdout=subprocess.DEVNULL if rank else subprocess.PIPE, text=True, env=environment,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        try:
            out, _ = processes[0].communicate(timeout=seconds + _LAST_READING)
        except subprocess.TimeoutExpired:
            out = ""
        finally:
            for process in processes[1:]:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
            for process in processes:
                process.kill()
                process.wait()
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    if any(process.returncode for process in processes):
        codes = [process.returncode for process in processes]
        found.append({"name": "failed", "shape": shape, "ranks": ranks, "exit_codes": codes})
    return found


def measure_all(shapes: Sequence[str], ranks: Sequence[int], seconds: float, out: Path | None) -> dict[str, Any]:
    """Writes after every shape and number of ranks."""
    end = time.monotonic() + seconds
    rate = 0.0
    if torch.cuda.is_available():
        from benchmarks.gpu.train_step import matmul_rate

        rate = matmul_rate()
        torch.cuda.empty_cache()
    found: dict[str, Any] = {"benchmark": "train_step_ranks", "matmul_flops_per_second": rate, "readings": []}
    asked = [(shape, count) for shape in shapes for count in ranks]
    for done, (shape, count) in enumerate(asked):
        share = max(end - time.monotonic(), 1.0) / (len(asked) - done)
        for reading in readings_of(shape, count, share):
            if rate and "flops_per_second" in reading:
                reading["mfu"] = reading["flops_per_second"] / count / rate
            found["readings"].append(reading)
            shown = {
                key: reading[key] for key in ("mfu", "tokens_per_second", "peak_gb", "exit_codes") if key in reading
            }
            print(f"{shape} on {count} rank(s), {reading['name']}: {shown}", flush=True)
        if out is not None:
            write_result(out, found)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--shapes", nargs="+", default=["1.5b"], choices=list(SHAPES))
    parser.add_argument("--seconds", type=float, default=200.0, help="no reading starts later than this")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(*given.ranks, given.child, given.shapes[0], given.seconds)
        return 0
    check_limits(parser, given)
    leave_on_signals()
    found = measure_all(["tiny"] if given.quick else given.shapes, given.ranks, given.seconds, given.out)
    return 1 if any(reading["name"] == "failed" for reading in found["readings"]) else 0


if __name__ == "__main__":
    sys.exit(main())
