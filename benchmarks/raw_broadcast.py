"""A plain ``torch.distributed.broadcast`` of an update's bytes between two processes, to compare with.

    python benchmarks/raw_broadcast.py RANK RENDEZVOUS_FILE BACKEND SHAPE TIMES        (used by gpu/two_gpu.py)

Rank 0 is the trainer: with NCCL it has the second GPU, rank 1 the first. One reading sends the tensors one by one, the
others the same bytes in buckets. Rank 0 prints JSON: seconds (medians, from when both are ready until both have the
bytes) and bytes/s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from demo_runs import bound  # noqa: E402
from sync_policy import SYNC_SHAPES, llama_config  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

BUCKETS = {"buckets of 64 MiB": 64 * 2**20, "buckets of 1 GiB": 2**30}


def raw_broadcast(shape: str, backend: str, times: int, timeout: float) -> dict[str, Any]:
    """Readings by kind, from two processes of their own.

    Raises:
        RuntimeError: one of them failed, or both took longer than ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__]
        arguments = [f"{folder}/meeting", backend, shape, str(times)]
        ranks = [
            subprocess.Popen(
                bound([*command, str(rank), *arguments]), stdout=(subprocess.PIPE, subprocess.DEVNULL)[rank], text=True
            )
            for rank in range(2)
        ]
        try:
            out, _ = ranks[0].communicate(timeout=timeout)
            ranks[1].communicate(timeout=10)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the raw broadcast took more than {timeout:g} s") from None
        finally:
            for process in ranks:
                with suppress(ProcessLookupError):
                    process.kill()
                process.wait()
    if not out.strip():
        raise RuntimeError("the raw broadcast failed")
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return found


def read(rank: int, meeting: str, backend: str, shape: str, times: int) -> None:
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", 1 - rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(llama_config(SYNC_SHAPES[shape]), dtype=torch.bfloat16)
    sizes = [parameter.nbytes for parameter in model.parameters()]
    found = {}
    buffer = torch.zeros(max(*BUCKETS.values(), *sizes) if sum(sizes) > 2**30 else sum(sizes), dtype=torch.uint8)
    buffer = buffer.to(device)
    kinds = {"tensor by tensor": sizes} | {kind: _cut(sum(sizes), size) for kind, size in BUCKETS.items()}
    for kind, parts in kinds.items():
        seconds = _median(lambda parts=parts: _send(buffer, parts), device, times)
        found[kind] = {"seconds": seconds, "bytes_per_second": sum(sizes) / seconds}
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def _cut(nbytes: int, size: int) -> list[int]:
    return [min(size, nbytes - start) for start in range(0, nbytes, size)]


def _send(buffer: torch.Tensor, parts: Sequence[int]) -> None:
    works = [dist.broadcast(buffer[:part], src=0, async_op=True) for part in parts]
    for work in works:
        assert work is not None
        work.wait()


def _median(work: Callable[[], None], device: torch.device, times: int) -> float:
    readings = []
    # NCCL would guess the device from the rank, and the two would wait on different ones
    own = [device.index] if device.type == "cuda" else None
    for _ in range(times + 1):
        dist.barrier(device_ids=own)
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier(device_ids=own)
        readings.append(time.perf_counter() - began)
    return median(readings[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rank", type=int, choices=[0, 1])
    parser.add_argument("meeting", metavar="rendezvous_file")
    parser.add_argument("backend", choices=["gloo", "nccl"])
    parser.add_argument("shape", choices=sorted(SYNC_SHAPES))
    parser.add_argument("times", type=int)
    given = parser.parse_args()
    read(given.rank, given.meeting, given.backend, given.shape, given.times)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
