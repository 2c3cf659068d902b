"""Peak memory and time of the log-probs of many tokens over a large vocabulary, forward and backward.

    python benchmarks/logprob_memory.py [--device cuda] [--tokens 32768 --vocabulary 151936 --hidden 896] [--out FILE]

Memory is what is held at the peak beside hidden states, head weight and their gradients, in units of one float32 chunk
[chunk, vocabulary]; the bound that we keep is 2.5. The roads: two kernels (CUDA with Triton), chunks in torch, and a
plain log_softmax over all logits.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from step_memory import LiveBytes
from torch import Tensor

import areal_like.algo.logprobs as logprobs_module
from areal_like.algo.logprobs import chunked_logprobs, logprobs_from_logits

Road = Callable[[Tensor, Tensor, Tensor], Tensor]


def roads(device: str, chunk: int) -> dict[str, Road]:
    def chunks(hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
        return chunked_logprobs(hidden, head, target, chunk_tokens=chunk).logprob_T

    def chunks_in_torch(hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
        with fused_kernels(False):
            return chunks(hidden, head, target)

    def all_logits(hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
        return logprobs_from_logits(hidden @ head.t(), target).logprob_T

    plain: dict[str, Road] = {"chunks in torch": chunks_in_torch, "all logits": all_logits}
    return {"two kernels": chunks} | plain if device == "cuda" else plain


@contextmanager
def fused_kernels(wanted: bool) -> Iterator[None]:
    """Without the kernels, where ``wanted`` is false."""
    found = logprobs_module._has_triton
    if not wanted:
        logprobs_module._has_triton = lambda: False  # type: ignore[assignment]
    try:
        yield
    finally:
        logprobs_module._has_triton = found


def measure(road: Road, hidden: Tensor, head: Tensor, target: Tensor, chunk_bytes: int) -> dict[str, float]:
    def once() -> None:
        road(hidden, head, target).sum().backward()

    def forget() -> None:
        hidden.grad = head.grad = None

    own = hidden.nbytes + head.nbytes  # of the gradients; the inputs are there before
    if hidden.is_cuda:
        once()
        forget()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        once()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        extra = torch.cuda.max_memory_allocated() - before - own
    else:
        with LiveBytes() as mode:
            once()
        forget()
        started = time.perf_counter()
        once()
        seconds = time.perf_counter() - started
        extra = mode.peak - own
    forget()
    return {"extra_gb": extra / 1e9, "chunks": extra / chunk_bytes, "seconds": seconds}


def read_all(device: str, tokens: int, vocabulary: int, hidden_size: int, chunk: int) -> dict[str, Any]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, device=device, dtype=dtype).requires_grad_()
    head = (torch.randn(vocabulary, hidden_size, device=device, dtype=dtype) * 0.05).requires_grad_()
    target = torch.randint(vocabulary, (tokens,), device=device)
    readings: dict[str, Any] = {}
    for name, road in roads(device, chunk).items():
        try:
            readings[name] = measure(road, hidden, head, target, 4 * chunk * vocabulary)
        except torch.OutOfMemoryError:
            readings[name] = "out of memory"
    return {
        "device": device,
        "dtype": str(dtype),
        "tokens": tokens,
        "vocabulary": vocabulary,
        "hidden": hidden_size,
        "chunk": chunk,
        "all_logits_gb": 4 * tokens * vocabulary / 1e9,
        "readings": readings,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=15000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = read_all(given.device, given.tokens, given.vocabulary, given.hidden, given.chunk)
    for name, reading in found["readings"].items():
        print(f"{name:16} {reading}")
    if given.out:
        given.out.write_text(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
