"""One reading of a train step, ours or plain Hugging Face. Used by train_step.py and gpu/train_step.py.

    python benchmarks/step_runs.py '{"what": "ours", "shape": "tiny", "tokens": 2048}'

A reading is a JSON object; :class:`Request` says what can be asked for. Times are medians over ``repeats`` after one
warm-up, with the device idle before and after.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from logprob_memory import fused_kernels
from step_shapes import SHAPES, Shape, batch_of, flops, row_lengths, trajectories, written_tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig

from areal_like.algo.packing import pack
from areal_like.api.trajectory import Trajectory
from areal_like.config.actor import ActorConfig
from areal_like.train.attention import ATTENTION_NAME, register_varlen_attention
from areal_like.train.engine import StepOutcome, TrainEngine
from areal_like.train.layers import compile_layers
from areal_like.train.model import PolicyModel, Sampling, prepare_for_training
from areal_like.train.parallel import Parallel, process_group
from areal_like.train.ppo import PpoUpdate

#: rows of a chunk of the plain loss, as in the anchors that we compare with
PLAIN_CHUNK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to measure.

    Attributes:
        what: ``ours``: an update; ``hf``: forward and backward of the same rows; ``profile``: ours, kernel by kernel.
        tokens: of one micro-batch; ``micro_batches`` of them make the batch.
        lengths: ``even`` or ``mixed`` (step_shapes.py), times ``scale``.
        fused: the two log-prob kernels, where there are any.
        prox: ``behave`` has no extra pass, so its time is that of forward, backward and optimiser; ``recompute`` is
            the whole decoupled update.
        optimizer: false for shapes whose master weights and moments do not fit: gradients are made and dropped.
        minibatches: optimiser steps.
        budget: tokens that a micro-batch may hold; 0: a little over ``tokens``, since rows do not fill it exactly.
    """

    what: str = "ours"
    shape: str = "tiny"
    tokens: int = 2048
    micro_batches: int = 2
    minibatches: int = 1
    budget: int = 0
    lengths: str = "mixed"
    scale: float = 1.0
    layout: str = "packed"
    compile: bool = False
    checkpointing: bool = False
    offload: bool = False
    fused: bool = True
    prox: str = "behave"
    optimizer: bool = True
    dtype: str = "float32"
    device: str = "cpu"
    repeats: int = 3


class _WithoutStep(TrainEngine):
    """Drops its gradients: what a shape costs whose optimiser does not fit on this device."""

    def step(self) -> StepOutcome:
        for parameter, _ in self._shards:
            parameter.grad = None
        return StepOutcome(grad_norm=0.0, lr=0.0, skipped=True)


def random_model(shape: Shape, *, device: str, dtype: torch.dtype, attention: str) -> nn.Module:
    register_varlen_attention()
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    assert isinstance(model, nn.Module)
    return model


def rows_of(request: Request) -> tuple[list[Trajectory], list[int]]:
    shape = SHAPES[request.shape]
    lengths = row_lengths(request.lengths, request.tokens * request.micro_batches, request.scale)
    return trajectories(shape, lengths), lengths


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


@contextmanager
def plain_update(request: Request) -> Iterator[Callable[[], Any]]:
    """A function that makes forward and backward of the same rows, padded, with transformers alone.

    The log-prob loss goes over chunks in float32, recomputed backwards; rows of like length share a micro-batch.
    """
    shape, dtype = SHAPES[request.shape], getattr(torch, request.dtype)
    rows, lengths = rows_of(request)
    model: Any = random_model(shape, device=request.device, dtype=dtype, attention="sdpa")
    model.train()
    if request.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if request.compile:
        compile_layers(model)
    plan = pack(lengths, max(request.tokens, max(lengths)), "padded")
    parts = [_padded([rows[i] for i in members], request.device) for members in plan]

    def update() -> None:
        for ids, targets, mask in parts:
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)[mask]
            total = hidden.new_zeros((), dtype=torch.float32)
            for start in range(0, len(targets), PLAIN_CHUNK):
                part = slice(start, start + PLAIN_CHUNK)
                total = total + checkpoint(
                    _chunk_logprob, hidden[part], model.lm_head.weight, targets[part], use_reentrant=False
                )
            (-total / len(targets)).backward()
        model.zero_grad(set_to_none=True)

    yield update


def _chunk_logprob(hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
    logits = (hidden @ head.t()).float()
    return torch.log_softmax(logits, -1).gather(1, target[:, None]).sum()


def _padded(rows: Sequence[Trajectory], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [rows, longest], targets [T], and indices [T] of the positions that predict them."""
    longest = max(row.length for row in rows) - 1
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    at, targets = [], []
    for i, row in enumerate(rows):
        tokens = torch.from_numpy(row.token_ids).long()
        ids[i, : row.length - 1] = tokens[:-1]
        written = torch.from_numpy(row.loss_mask).nonzero().squeeze(1)
        at.append(i * longest + written - 1)
        targets.append(tokens[written])
    return ids.to(device), torch.cat(targets).to(device), torch.cat(at).to(device)


def idle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


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
    needed = flops(shape, lengths, written, passes=passes)
    around = our_update(request, parallel) if request.what == "ours" else plain_update(request)
    with around as update:
        seconds, readings, first = median_seconds(update, request.device, request.repeats)
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
        "flops_per_second": needed / seconds,
        "peak_gb": peak_gb(request.device),
    }


def peak_gb(device: str) -> float:
    """Largest memory of the device while the readings ran; on the CPU the largest of the process so far."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


#: kernels by what they do, first match wins
_KINDS = (
    ("attention", ("flash", "fmha", "attention")),
    ("logits", ("_softmax_forward", "_softmax_backward")),
    ("products", ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitk")),
    ("optimiser", ("adam", "multi_tensor", "foreach")),
    ("sharding", ("nccl", "split_with_sizes", "chunk_cat", "catarray", "memcpy", "memset")),
    ("layers' elementwise", ("triton",)),
)


def profile(request: Request, parallel: Parallel) -> dict[str, Any]:
    """Where the time of one update goes: milliseconds by kind of kernel, the largest kernels, and the idle time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with our_update(request, parallel) as update:
        update()
        idle(request.device)
        with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            started = time.perf_counter()
            update()
            idle(request.device)
            wall = time.perf_counter() - started
    kernels: dict[str, list[float]] = {}
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            total = kernels.setdefault(event.name, [0.0, 0.0])
            total[0] += event.self_device_time_total / 1e3
            total[1] += 1
    kinds: dict[str, float] = {}
    for name, (milliseconds, _) in kernels.items():
        kind = next((k for k, words in _KINDS if any(w in name.lower() for w in words)), "other")
        kinds[kind] = kinds.get(kind, 0.0) + milliseconds
    largest = sorted(kernels.items(), key=lambda pair: -pair[1][0])[:25]
    return asdict(request) | {
        "wall_ms": wall * 1e3,
        "busy_ms": sum(kinds.values()),
        "kinds_ms": dict(sorted(kinds.items(), key=lambda pair: -pair[1])),
        "kernels": [{"name": n[:120], "ms": ms, "calls": int(calls)} for n, (ms, calls) in largest],
    }


def run(requests: Sequence[Request]) -> Iterator[dict[str, Any]]:
    """Answer in turn; a reading that does not fit into memory is an answer, too."""
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
            torch._dynamo.reset()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()


def main() -> int:
    for reading in run([Request(**fields) for fields in map(json.loads, sys.argv[1:])]):
        print(json.dumps(reading), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
