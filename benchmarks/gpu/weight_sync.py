"""Weight updates of a vLLM server that shares one GPU with the trainer, under running requests.

    python benchmarks/gpu/weight_sync.py [--shapes 135m 6b] [--python ENGINE_PYTHON] [--seconds 420] [--out FILE]

For every shape one server with dummy weights, and for every transport (ipc: CUDA IPC; shm; disk) and interrupt mode
some updates while 256 long answers are being written: seconds exporting, staging, paused, and in all. After each update
a fresh answer's log-probs are compared with a forward pass of the trainer's own model; the receipt's digest is checked
by the channel; and every answer under way must come back with all of its tokens. Beside them what the hardware does
with the same bytes: copies on the device, over the bus and in memory, and a write to the disk.

Without a GPU it runs on a CPU (``--quick``), where ipc does not exist, to show that every step works; ``--engine
embedded`` needs no vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
sys.path[:0] = [str(BENCHMARKS), str(ROOT)]

from raw_copies import raw_readings  # noqa: E402
from sync_policy import Policy  # noqa: E402
from sync_runs import Way  # noqa: E402
from sync_servers import Server  # noqa: E402
from update_readings import (  # noqa: E402
    LEAST_SECONDS,
    MODES,
    PLANS,
    Bench,
    Plan,
    add_options,
    bench_of,
    check_engine,
    line_of,
    make_policy,
    serving,
    updates_under_load,
)

from areal_like.api.weights import InterruptMode, TransportKind  # noqa: E402
from areal_like.weights.device_digest import DeviceDigests, tried_kernel  # noqa: E402
from benchmarks.gpu.refusals import check_folder, check_limits  # noqa: E402

#: seconds that four updates through the host take for each byte: copied off the device, hashed, written, read, hashed
#: again, and loaded
HOST_SECONDS_PER_BYTE = 4e-9
#: versions that lie in memory or on a disk at once, and bytes of room beside them
VERSIONS_KEPT, ROOM = 2, 2 * 2**30
DIGEST_TIMES = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["135m", "6b"], choices=sorted(PLANS))
    parser.add_argument("--transports", nargs="+", default=["ipc", "shm", "disk"], choices=["ipc", "shm", "disk"])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    add_options(parser, seconds=420.0)
    options = parser.parse_args()
    check_limits(parser, options)
    check_folder(parser, "--disk", options.disk)
    check_engine(parser, options)
    rows: dict[str, Any] = {}
    with bench_of("gpu_weight_sync", options, gpu=0) as bench:
        bench.found["shapes"] = rows
        for name in ["tiny"] if options.quick else options.shapes:
            rows[name] = {}
            try:
                measure_shape(bench, PLANS[name], rows[name])
            except Exception as error:  # the other shapes are still worth having
                rows[name]["failed"] = f"{type(error).__name__}: {error}"[-4000:]
                bench.say(f"{name}: {rows[name]['failed']}")
            bench.write()
    return 0 if all("failed" not in row for row in rows.values()) else 1


def measure_shape(bench: Bench, plan: Plan, row: dict[str, Any]) -> None:
    """Fills ``row`` as readings come in."""
    policy = make_policy(bench, plan)
    row |= {"parameters": policy.shape.parameters, "bytes": policy.nbytes, "requests": plan.requests}
    row["raw"] = raw_readings(policy.weights.values(), bench.folder)
    for kind, reading in row["raw"].items():
        bench.say(f"{plan.shape}: {kind}: {reading['seconds']:.3f} s, {reading['bytes_per_second'] / 1e9:.1f} GB/s")
    row["digests"] = digest_readings(policy)
    bench.say(f"{plan.shape}: digests: {row['digests']}")
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    transports = bench.options.transports
    with serving(bench, plan, shared=True, transport="ipc" if _has_ipc(bench) else "shm") as server:
        row |= {"seconds_to_start": server.seconds_to_start, "updates": {}}
        for transport in transports:
            for mode in bench.options.modes:
                name = f"{transport}, {mode}"
                row["updates"][name] = reading = measure_way(bench, plan, policy, server, (transport, mode))
                bench.say(f"{plan.shape}: {name}: {line_of(reading)}")
                bench.write()
                if server.ended():
                    raise RuntimeError(f"the server ended:\n{server.said()}")
    policy.weights.clear()
    del policy
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


def digest_readings(policy: Policy) -> dict[str, float | None]:
    """Seconds for the digests of all tensors on the device, the best of three: by plain torch, and by the kernel (None
    where there is none), tensor by tensor as a trainer does it, and many at once as a server does.
    """
    tensors = list(policy.weights.values())
    found: dict[str, float | None] = {}
    for kind, plain, at_once in (("plain", True, 1), ("fused", False, 1), ("fused, many at once", False, 16)):
        if not plain and tried_kernel(policy.device) is None:
            found[kind] = None
            continue
        digests = DeviceDigests(policy.device, plain=plain)
        digests.reserve(max(tensor.nbytes for tensor in tensors))
        seconds = []
        for _ in range(DIGEST_TIMES):
            policy.wait()
            began = time.perf_counter()
            for start in range(0, len(tensors), at_once):
                digests.add(*tensors[start : start + at_once])
            digests.read()
            seconds.append(time.perf_counter() - began)
        found[kind] = min(seconds)
    return found


def measure_way(bench: Bench, plan: Plan, policy: Policy, server: Server, way: tuple[str, str]) -> dict[str, Any]:
    """One transport and mode; never raises for what goes wrong there."""
    reason = not_run(bench, way[0], policy.nbytes)
    if reason:
        return {"not_run": reason}
    try:
        asked = Way(kind=TransportKind(way[0]), mode=InterruptMode(way[1]))
        return asyncio.run(updates_under_load(bench, plan, policy, server, asked))
    except Exception as error:  # one way that fails leaves the others
        return {"failed": f"{type(error).__name__}: {error}"[-2000:], "log": server.said()[-1500:]}


def _has_ipc(bench: Bench) -> bool:
    known = "ipc" in list(TransportKind)
    return known and "ipc" in bench.options.transports and bench.device.type == "cuda"


def not_run(bench: Bench, transport: str, nbytes: int) -> str:
    """Why this transport cannot be measured here, or nothing."""
    through_host = transport in ("shm", "disk")
    if bench.left < LEAST_SECONDS + (nbytes * HOST_SECONDS_PER_BYTE if through_host else 0.0):
        return "the time was over"
    if transport == "ipc" and bench.device.type != "cuda":
        return "CUDA IPC needs a GPU"
    if transport not in list(TransportKind):
        return f"this version has no transport {transport}"
    where = {"shm": Path("/dev/shm"), "disk": bench.folder}.get(transport)
    if where is not None:
        needed, free = VERSIONS_KEPT * nbytes + ROOM, shutil.disk_usage(where).free
        if free < needed:
            return f"{needed / 1e9:.0f} GB needed for {transport}, {free / 1e9:.0f} GB free"
    return ""


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1" if not torch.cuda.is_available() else "8")
    sys.exit(main())
