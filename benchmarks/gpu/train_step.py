"""Decoupled-PPO updates on one GPU: tokens/s, MFU against the measured matmul rate, memory, ablations, a profile.

    python benchmarks/gpu/train_step.py [--shapes 0.5b 1.5b 7b] [--seconds 500] [--out FILE]

Llama shapes with random weights, bf16 compute, float32 master weights. For every shape, in a process of its own: plain
transformers (forward and backward alone, padded, with and without torch.compile), ours with rows of 2,048 tokens and
with rows of very different lengths, the whole update with its prox pass, the same without one optimisation at a time,
and where the time of a step goes. Beside them the log-probs of 32k tokens over a vocabulary of 152k.

MFU counts what the step needs: 6 (forward and backward) or 8 (with the prox pass) operations a parameter and token,
the head for written tokens only, causal attention; nothing that is recomputed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
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

from logprob_memory import read_all  # noqa: E402
from step_runs import Request, run  # noqa: E402


def matmul_rate(size: int = 8192, repeats: int = 20) -> float:
    """FLOP/s of one bf16 product on random data, median of timed ones."""
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
    common: dict[str, Any] = {"shape": shape, "device": "cuda", "dtype": "bfloat16", "compile": True}
    if shape == "7b":  # master weights fit beside the activations, AdamW's moments do not
        common |= {"tokens": 8192, "micro_batches": 4, "minibatches": 4, "budget": 14000, "optimizer": False}
        return [
            ("ours, mixed rows", Request(**common)),
            ("hf, even rows", Request(what="hf", lengths="even", **common)),
            ("ours, even rows", Request(lengths="even", **common)),
            ("profile", Request(what="profile", **common)),
            ("hf, even rows, no compile", Request(what="hf", lengths="even", **common | {"compile": False})),
            ("ours, checkpointing", Request(checkpointing=True, **common)),
        ]
    common |= {"tokens": 16384, "micro_batches": 4}
    found = [
        ("ours, mixed rows", Request(**common)),
        ("hf, even rows", Request(what="hf", lengths="even", **common)),
        ("ours, even rows", Request(lengths="even", **common)),
        ("ours, mixed rows, whole update", Request(prox="recompute", **common)),
        ("profile", Request(what="profile", **common)),
        ("hf, mixed rows", Request(what="hf", **common)),
        ("without fused log-probs", Request(fused=False, **common)),
        ("without packing", Request(layout="padded", **common)),
        ("without compile", Request(**common | {"compile": False})),
        ("with checkpointing, 32k", Request(checkpointing=True, **common | {"tokens": 32768, "micro_batches": 2})),
    ]
    if shape == "0.5b":
        found += [
            ("32k tokens", Request(**common | {"tokens": 32768, "micro_batches": 2})),
            ("8k tokens", Request(**common | {"tokens": 8192, "micro_batches": 8})),
            ("hf, even rows, no compile", Request(what="hf", lengths="even", **common | {"compile": False})),
            ("with an offloaded optimiser", Request(offload=True, **common)),
        ]
    return found


def child(shape: str, seconds: float, only: Sequence[str]) -> int:
    """Answer the shape's requests on stdout until the time is over."""
    end = time.monotonic() + seconds
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    named = [(name, request) for name, request in requests(shape) if not only or name in only]
    answers = run([request for _, request in named])
    for name, _ in named:
        if time.monotonic() > end:
            break
        print(json.dumps({"name": name} | next(answers)), flush=True)
    return 0


def answers_of(shape: str, seconds: float, only: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Of a process of its own, so that no shape leaves memory or compiled code to the next."""
    command = [sys.executable, __file__, "--child", shape, "--seconds", str(seconds), "--only", *only]
    environment = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if process.returncode:
        yield {"name": "failed", "shape": shape, "exit_code": process.returncode}


def line_of(answer: dict[str, Any], rate: float) -> str:
    name = f"{answer.get('shape', ''):5} {answer['name']:32}"
    if "tokens_per_second" in answer:
        answer["mfu"] = answer["flops_per_second"] / rate
        return (
            f"{name} {answer['tokens_per_second'] / 1e3:7.1f}k tok/s  mfu {answer['mfu']:.3f}  "
            f"{answer['peak_gb']:6.1f} GB  first {answer['first_seconds']:5.1f} s"
        )
    if "kinds_ms" in answer:
        kinds = "  ".join(f"{kind} {ms:.1f}" for kind, ms in answer["kinds_ms"].items())
        return f"{name} wall {answer['wall_ms']:.1f} ms, busy {answer['busy_ms']:.1f} ms: {kinds}"
    return f"{name} {json.dumps({k: answer[k] for k in ('out_of_memory', 'exit_code') if k in answer})}"


def this_machine() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    import transformers

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def measure_all(shapes: Sequence[str], seconds: float, out: Path | None, only: Sequence[str] = ()) -> None:
    """Writes after every reading, so that a run that is cut leaves what it has."""
    end = time.monotonic() + seconds
    found: dict[str, Any] = this_machine() | {"matmul_flops_per_second": matmul_rate(), "readings": []}
    rate = found["matmul_flops_per_second"]
    print(f"{found['gpu']}, torch {found['torch']}: bf16 matmul {rate / 1e12:.0f} TFLOP/s", flush=True)
    found["logprob_memory"] = read_all("cuda", 32768, 151936, 896, 4096)
    for name, reading in found["logprob_memory"]["readings"].items():
        print(f"log-probs of 32k tokens, {name}: {reading}", flush=True)
    torch.cuda.empty_cache()
    for done, shape in enumerate(shapes):
        left = end - time.monotonic()
        for answer in answers_of(shape, left / (len(shapes) - done), only):
            found["readings"].append(answer)
            print(line_of(answer, rate), flush=True)
            if out is not None:
                out.write_text(json.dumps(found, indent=2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["0.5b", "1.5b", "7b"])
    parser.add_argument("--seconds", type=float, default=500.0, help="no reading starts later than this")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="names of readings; default: all")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="show what would be measured")
    given = parser.parse_args()
    if given.child:
        return child(given.child, given.seconds, given.only)
    if given.list:
        for shape in given.shapes:
            for name, request in requests(shape):
                print(f"{shape:5} {name:32} {asdict(request)}")
        return 0
    measure_all(given.shapes, given.seconds, given.out, given.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
