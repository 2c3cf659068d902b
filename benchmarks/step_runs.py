"""One reading of a train step, ours or plain Hugging Face. Used by train_step.py and gpu/train_step.py.

    python benchmarks/step_runs.py '{"what": "ours", "shape": "tiny", "tokens": 2048}'

A reading is a JSON object; :class:`Request` says what can be asked for. Times are medians over ``repeats`` after one
warm-up, with the device idle before and after. On a CPU, memory is that of one more step, in which tensors are counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from logprob_memory import fused_kernels
from step_memory import memory_on_cpu, memory_on_cuda, resident
from step_models import random_model
from step_plain import plain_update
from step_profile import idle, needed, profiled
from step_shapes import SHAPES, Request, batch_of, flops, rows_of, written_tokens

from areal_like.api.trajectory import Trajectory
from areal_like.config.actor import ActorConfig
from areal_like.train.attention import ATTENTION_NAME
from areal_like.train.engine import StepOutcome, TrainEngine
from areal_like.train.model import PolicyModel, Sampling, prepare_for_training
from areal_like.train.parallel import Parallel, process_group
from areal_like.train.ppo import PpoUpdate


class _WithoutStep(TrainEngine):
    """Drops its gradients: what a shape costs whose optimiser does not fit on this device."""

    def step(self) -> StepOutcome:
        for parameter, _ in self._shards:
            parameter.grad = None
        return StepOutcome(grad_norm=0.0, lr=0.0, skipped=True)


def actor_of(request: Request, rows: Sequence[Trajectory]) -> ActorConfig:
    # a row is one token longer than what is read of it, and rows do not fill a bin exactly
    budget = request.budget or int(request.tokens * 1.02) + max(row.length for row in rows) // 8
    return ActorConfig.model_validate(
        {
            "mb_spec": {"packing": request.layout, "max_tokens_per_mb": budget},
            "ppo_n_minibatches": request.minibatches,
            "prox": request.prox,
            "optimizer": {"lr": 1e-6},
        }
    )


@contextmanager
def our_update(request: Request, parallel: Parallel) -> Iterator[Callable[[], Any]]:
    """A function that makes one update."""
    shape, dtype = SHAPES[request.shape], getattr(torch, request.dtype)
    rows, _ = rows_of(request)
    attention = ATTENTION_NAME if request.layout == "packed" else "sdpa"
    model = random_model(shape, device=request.device, dtype=torch.float32, attention=attention)
    prepare_for_training(model, gradient_checkpointing=request.checkpointing, compiled=request.compile)
    actor = actor_of(request, rows)
    kind = TrainEngine if request.optimizer else _WithoutStep
    engine = kind(
        PolicyModel(model, Sampling()),
        parallel,
        actor.optimizer,
        total_steps=1000,
        compute_dtype=dtype,
        offload=request.offload,
    )
    by_key = {row.episode_id: row for row in rows}
    update = PpoUpdate(engine, actor, lambda keys: [by_key[key] for key in keys])
    batch = batch_of(rows)
    with fused_kernels(request.fused):
        yield lambda: update.run(batch)


def median_seconds(function: Callable[[], Any], device: str, repeats: int) -> tuple[float, list[float], float]:
    """Median, all readings, and the seconds of the warm-up, which holds the compilation."""

    def once() -> float:
        idle(device)
        started = time.perf_counter()
        function()
        idle(device)
        return time.perf_counter() - started

    first = once()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    readings = sorted(once() for _ in range(repeats))
    return readings[len(readings) // 2], readings, first


def measure(request: Request, parallel: Parallel) -> dict[str, Any]:
    """Tokens are positions read. ``flops`` are those that the step needs; divide by seconds for the rate."""
    shape = SHAPES[request.shape]
    rows, lengths = rows_of(request)
    written = written_tokens(rows)
    passes = 4.0 if request.what == "ours" and request.prox == "recompute" else 3.0
    dtype = getattr(torch, request.dtype)
    held = resident(request.what, dtype, shape.parameters, optimizer=request.optimizer, shards=max(parallel.shards, 1))
    around = our_update(request, parallel) if request.what == "ours" else plain_update(request)
    with around as update:
        seconds, readings, first = median_seconds(update, request.device, request.repeats)
        memory = memory_on_cuda(held) if request.device == "cuda" else memory_on_cpu(held, update)
    return asdict(request) | {
        "rows": len(rows),
        "tokens_read": sum(lengths),
        "tokens_written": sum(written),
        "longest": max(lengths),
        "parameters": shape.parameters,
        "seconds": seconds,
        "readings": readings,
        "first_seconds": first,
        "tokens_per_second": sum(lengths) / seconds,
        "flops_per_second": flops(shape, lengths, written, passes=passes) / seconds,
        # what all logits of one micro-batch would take
        "all_logits_gb": 4 * request.tokens * shape.vocabulary / 1e9,
        **memory,
    }


def profile(request: Request, parallel: Parallel) -> dict[str, Any]:
    """Where the time of one of our updates goes."""
    rows, lengths = rows_of(request)
    with our_update(request, parallel) as update:
        update()
        found = profiled(update, request.device)
    return asdict(request) | {"needed_flops": needed(SHAPES[request.shape], lengths, written_tokens(rows))} | found


def run(requests: Sequence[Request]) -> Iterator[dict[str, Any]]:
    """Answer in turn; a reading that does not fit into memory, or fails, is an answer, too."""
    device = torch.device("cuda", 0) if requests[0].device == "cuda" else torch.device("cpu")
    with (
        tempfile.TemporaryDirectory() as folder,
        process_group(
            rank=0, world_size=1, rendezvous=f"file://{Path(folder) / 'rendezvous'}", device=device, timeout=600
        ) as parallel,
    ):
        for request in requests:
            try:
                yield profile(request, parallel) if request.what == "profile" else measure(request, parallel)
            except torch.OutOfMemoryError as error:
                yield asdict(request) | {"out_of_memory": str(error)[:200]}
            except Exception as error:  # one reading's fault must not cost the others
                yield asdict(request) | {"failed": f"{type(error).__name__}: {error}"[:500]}
            torch._dynamo.reset()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", nargs="+", type=json.loads, metavar="REQUEST", help="a JSON object of its fields")
    for reading in run([Request(**fields) for fields in parser.parse_args().requests]):
        print(json.dumps(reading), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
