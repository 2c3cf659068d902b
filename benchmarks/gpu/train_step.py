"""Decoupled-PPO updates on one GPU: tokens/s, MFU against the measured matmul rate, memory, ablations, profiles.

    python benchmarks/gpu/train_step.py [--shapes 0.5b 1.5b 7b] [--seconds 300] [--out FILE]
    python benchmarks/gpu/train_step.py --quick        # does it run? seconds, also without a GPU
    python benchmarks/gpu/train_step.py --show FILE    # tables

Llama shapes with random weights, bf16 compute, float32 master weights. For every shape, in a process of its own: ours
with rows of 2,048 tokens and with rows of very different lengths, the whole update with its prox pass, the same without
one optimisation at a time, and where the time of a step goes. Beside it transformers on the same rows: forward and
backward of bf16 weights alone (``hf``), and steps of AdamW with as much precision as ours, on float32 weights under
autocast (``hf step``) and on float32 masters of bf16 weights (``with masters``). And the log-probs of 32k tokens over a
vocabulary of 152k.

MFU counts what the step needs: 6 (forward and backward) or 8 (with the prox pass) operations a parameter and token,
the head for written tokens only, causal attention; nothing that is recomputed. Memory is the device's peak, and what of
it lies above weights, gradients and optimiser state (``above_resident_gb``).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
sys.path[:0] = [str(BENCHMARKS), str(ROOT)]

from demo_runs import bound, leave_on_signals  # noqa: E402
from logprob_memory import read_all  # noqa: E402
from step_runs import run  # noqa: E402
from step_shapes import SHAPES, Request  # noqa: E402

from benchmarks.gpu.refusals import check_limits  # noqa: E402

#: seconds that a child gets to end after its time is over; then it is killed
GRACE = 60.0


def matmul_rate(size: int = 8192, repeats: int = 20) -> float:
    """FLOP/s of one bf16 product on random data, median of timed ones."""
    if not torch.cuda.is_available():
        return float("nan")
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        a @ b
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        a @ b
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * size**3 / sorted(times)[len(times) // 2]


def requests(shape: str) -> list[tuple[str, Request]]:
    """Named readings, the most wanted first: time may run out."""
    common: dict[str, Any] = {"shape": shape, "device": "cuda", "dtype": "bfloat16", "compile": True, "repeats": 3}
    if shape == "7b":
        return _large(common | {"tokens": 8192, "micro_batches": 4, "repeats": 2})
    common |= {"tokens": 16384, "micro_batches": 4}
    if shape == "tiny":  # tries the script out
        device = "cuda" if torch.cuda.is_available() else "cpu"
        common |= {"tokens": 512, "micro_batches": 2, "repeats": 1, "scale": 0.05, "device": device, "compile": False}
    found = [
        ("ours, mixed rows", Request(**common)),
        ("hf, even rows", Request(what="hf", lengths="even", **common)),
        ("ours, even rows", Request(lengths="even", **common)),
        ("hf step, even rows", Request(what="hf-step", lengths="even", **common)),
        ("profile", Request(what="profile", **common)),
        ("without compile", Request(**common | {"compile": False})),
        ("without fused log-probs", Request(fused=False, **common)),
        ("with checkpointing", Request(checkpointing=True, **common)),
        ("without packing", Request(layout="padded", **common)),
        ("ours, mixed rows, whole update", Request(prox="recompute", **common)),
        ("hf step with masters, even rows", Request(what="hf-masters", lengths="even", **common)),
    ]
    if shape == "0.5b":
        small = common | {"tokens": 8192, "micro_batches": 8}
        found[5:5] = [("8k tokens", Request(**small)), ("profile, 8k tokens", Request(what="profile", **small))]
        found += [
            ("hf, mixed rows", Request(what="hf", **common)),
            ("ours, even rows, checkpointing", Request(lengths="even", checkpointing=True, **common)),
            (
                "hf step, even rows, checkpointing",
                Request(what="hf-step", lengths="even", checkpointing=True, **common),
            ),
            ("with an offloaded optimiser", Request(offload=True, **common)),
        ]
    return found


def _large(common: dict[str, Any]) -> list[tuple[str, Request]]:
    """Master weights, their sums of gradients and AdamW's moments leave no room for all activations: gradients are

    dropped, or layers recomputed.
    """
    dropped = common | {"optimizer": False}
    return [
        ("ours, even rows", Request(lengths="even", **dropped)),
        ("hf, even rows", Request(what="hf", lengths="even", **common)),
        ("ours, mixed rows", Request(**dropped)),
        ("ours, even rows, checkpointing", Request(lengths="even", checkpointing=True, **common)),
        ("profile", Request(what="profile", **dropped)),
        ("hf step, even rows, checkpointing", Request(what="hf-step", lengths="even", checkpointing=True, **common)),
    ]


def anchors(quick: bool) -> dict[str, Any]:
    """What the readings are compared with."""
    sizes = (256, 1000, 64, 64) if quick else (32768, 151936, 896, 4096)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {"name": "anchors", "matmul_flops_per_second": matmul_rate(), "logprob_memory": read_all(device, *sizes)}


def child(shape: str, seconds: float, only: Sequence[str]) -> int:
    """Answer the shape's requests on stdout until the time is over."""
    end = time.monotonic() + seconds
    if shape.startswith("anchors"):
        print(json.dumps(anchors(shape == "anchors-quick")), flush=True)
        return 0
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    named = [(name, request) for name, request in requests(shape) if not only or name in only]
    answers = run([request for _, request in named])
    for name, _ in named:
        if time.monotonic() > end:
            break
        print(json.dumps({"name": name} | next(answers)), flush=True)
    return 0


def answers_of(shape: str, seconds: float, only: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Of a process of its own, so that no shape leaves memory or compiled code to the next."""
    command = bound([sys.executable, __file__, "--child", shape, "--seconds", str(seconds), "--only", *only])
    environment = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        killer = threading.Timer(seconds + GRACE, process.kill)
        killer.start()
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
        except BaseException:
            process.kill()  # else leaving waits for it
            raise
        finally:
            killer.cancel()
    if process.returncode:
        yield {"name": "failed", "shape": shape, "exit_code": process.returncode}


def line_of(answer: dict[str, Any], rate: float) -> str:
    name = f"{answer.get('shape', ''):5} {answer['name']:32}"
    if "tokens_per_second" in answer:
        answer["mfu"] = answer["flops_per_second"] / rate
        memory = f"{answer['peak_gb']:6.1f} GB ({answer['above_resident_gb']:5.1f} above)"
        speed = f"{answer['tokens_per_second'] / 1e3:7.1f}k tok/s  mfu {answer['mfu']:.3f}"
        return f"{name} {speed}  {memory}  first {answer['first_seconds']:5.1f} s"
    if "kinds_ms" in answer:
        kinds = "  ".join(f"{kind} {ms:.1f}" for kind, ms in answer["kinds_ms"].items())
        return f"{name} wall {answer['wall_without_profiler_ms']:.1f} ms, busy {answer['busy_ms']:.1f} ms: {kinds}"
    return f"{name} {json.dumps({k: answer[k] for k in ('out_of_memory', 'failed', 'exit_code') if k in answer})}"


def this_machine() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    import transformers

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def measure_all(shapes: Sequence[str], seconds: float, out: Path | None, only: Sequence[str] = ()) -> dict[str, Any]:
    """Writes after every reading, so that a run that is cut leaves what it has."""
    end = time.monotonic() + seconds
    found: dict[str, Any] = this_machine() | {"readings": []}
    rate = float("nan")
    for answer in answers_of("anchors-quick" if "tiny" in shapes else "anchors", GRACE):
        found |= answer
        rate = answer.get("matmul_flops_per_second", rate)
    print(f"{found['gpu']}, torch {found['torch']}: bf16 matmul {rate / 1e12:.0f} TFLOP/s", flush=True)
    for name, reading in found.get("logprob_memory", {}).get("readings", {}).items():
        print(f"log-probs of many tokens, {name}: {reading}", flush=True)
    for done, shape in enumerate(shapes):
        left = end - time.monotonic()
        for answer in answers_of(shape, left / (len(shapes) - done), only):
            found["readings"].append(answer)
            print(line_of(answer, rate), flush=True)
            if out is not None:
                out.write_text(as_json(found) + "\n")
    return found


def as_json(found: Any) -> str:
    """What JSON has no number for (NaN, infinity) is null: a rate that was not measured, and what follows from it."""
    return json.dumps(_finite(found), indent=2, allow_nan=False)


def _finite(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _finite(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_finite(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def show(found: dict[str, Any]) -> None:
    """The readings of a file as tables, and those of the runs before that it keeps under ``earlier``."""
    for one in (found, *found.get("earlier", ())):
        rate = number(one.get("matmul_flops_per_second")) / 1e12
        print(f"\n{one['date']}, commit {one['commit'][:7]}, bf16 matmul {rate:.0f} TFLOP/s\n")
        show_run(one["readings"])


def number(found: float | None) -> float:
    """As it was before it was written: null is no number."""
    return float("nan") if found is None else found


def show_run(readings: Sequence[dict[str, Any]]) -> None:
    print("| shape | reading | tokens/s | MFU | peak GB | above weights, gradients and moments |")
    print("| --- | --- | --- | --- | --- | --- |")
    for answer in readings:
        name = f"| {answer.get('shape', '')} | {answer['name']}"
        if "mfu" in answer:
            above = f"{answer['above_resident_gb']:.1f}" if "above_resident_gb" in answer else ""
            memory = f"{answer['peak_gb']:.1f} | {above}"
            print(f"{name} | {answer['tokens_per_second'] / 1e3:.1f}k | {number(answer['mfu']):.2f} | {memory} |")
        elif "kinds_ms" not in answer:
            print(f"{name} | {line_of(answer, 1.0)} | | | |")
    for answer in readings:
        if "kinds_ms" in answer:
            wall = answer.get("wall_without_profiler_ms", answer["wall_ms"])
            kinds = ", ".join(f"{kind} {ms:.0f}" for kind, ms in answer["kinds_ms"].items())
            print(f"\n{answer['shape']}, {answer['name']}: {wall:.0f} ms: {kinds}; idle {wall - answer['busy_ms']:.0f}")
            if "host" in answer:
                print("host: " + ", ".join(f"{part['name']} {part['ms']:.0f}" for part in answer["host"][:8]))


def status_of(readings: Sequence[dict[str, Any]]) -> int:
    """1 if a reading failed, or there is none; running out of memory is a reading."""
    return 1 if not readings or any("failed" in (*reading, reading["name"]) for reading in readings) else 0


def check(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """``--only`` names readings of the shapes that are asked for.

    Raises:
        SystemExit: otherwise.
    """
    known = dict.fromkeys(name for shape in given.shapes for name, _ in requests(shape))
    strange = [name for name in given.only if name not in known]
    if strange:
        parser.error(f"--only {', '.join(map(repr, strange))}: no such reading; there are: {'; '.join(known)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["0.5b", "1.5b", "7b"], choices=list(SHAPES))
    parser.add_argument("--seconds", type=float, default=300.0, help="no reading starts later than this")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="names of readings; default: all")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--show", type=Path, help="print the tables of a file that was written before")
    parser.add_argument("--list", action="store_true", help="show what would be measured")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, seconds, on a CPU where there is no GPU")
    given = parser.parse_args()
    if given.quick:
        given.shapes = ["tiny"]
    if given.show:
        show(json.loads(given.show.read_text()))
        return 0
    if given.child:
        return child(given.child, given.seconds, given.only)
    check_limits(parser, given)
    check(parser, given)
    if given.list:
        for shape in given.shapes:
            for name, request in requests(shape):
                if not given.only or name in given.only:
                    print(f"{shape:5} {name:32} {asdict(request)}")
        return 0
    if given.shapes != ["tiny"] and not torch.cuda.is_available():
        parser.error("it needs a GPU, and none is visible; --quick runs on a CPU")
    leave_on_signals()
    found = measure_all(given.shapes, given.seconds, given.out, given.only)
    return status_of(found["readings"])


if __name__ == "__main__":
    sys.exit(main())
