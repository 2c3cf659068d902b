"""Weight updates of a vLLM server that shares one GPU with the trainer, under running requests.

    python benchmarks/gpu/weight_sync.py [--shapes 135m 6b] [--python ENGINE_PYTHON] [--seconds 420] [--out FILE]

For every shape one server with dummy weights, and for every transport (ipc: CUDA IPC; shm; disk) and interrupt mode
some updates while 256 long answers are being written: seconds exporting, staging, paused, and in all. After each update
a fresh answer's log-probs are compared with a forward pass of the trainer's own model; the receipt's digest is checked
by the channel; and every answer under way must come back with all of its tokens. Beside them what the hardware does
with the same bytes: copies on the device, over the bus and in memory, and a write to the disk.

Without a GPU it runs on a CPU (``--quick``), where ipc does not exist, to show that every step works.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
sys.path[:0] = [str(BENCHMARKS), str(ROOT)]

from demo_runs import write_result  # noqa: E402
from raw_copies import raw_readings  # noqa: E402
from sync_policy import SYNC_SHAPES, Policy, write_model_folder  # noqa: E402
from sync_runs import Load, Server, Way, end_at, engine_version, open_line, running, server_spec  # noqa: E402

from areal_like.api.weights import InterruptMode, TransportKind  # noqa: E402

#: seconds that a row must have left to begin: exporting and hashing 12 GB twice takes longer on a host path
LEAST_SECONDS = 40.0
#: bytes beside the weights that a path through memory or a disk needs: two versions, and some room
VERSIONS_KEPT, ROOM = 2, 2 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one shape is measured with. ``server_bytes`` is the server's share of the GPU."""

    shape: str
    requests: int
    answer_tokens: int
    updates: int
    host_updates: int
    server_bytes: float = 0.0


PLANS = {
    "tiny": Plan(shape="tiny", requests=8, answer_tokens=48, updates=2, host_updates=2),
    "135m": Plan(shape="135m", requests=256, answer_tokens=512, updates=5, host_updates=3, server_bytes=24e9),
    "6b": Plan(shape="6b", requests=256, answer_tokens=256, updates=4, host_updates=1, server_bytes=64e9),
}


@dataclass(slots=True, kw_only=True)
class Bench:
    """What all readings share."""

    arguments: argparse.Namespace
    folder: Path
    device: torch.device
    end: float
    found: dict[str, Any] = field(default_factory=dict)
    versions: int = 0

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def write(self) -> None:
        if self.arguments.out is not None:
            write_result(self.arguments.out, self.found)

    def say(self, text: str) -> None:
        print(f"[{self.left:6.0f} s left] {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["135m", "6b"], choices=sorted(PLANS))
    parser.add_argument("--transports", nargs="+", default=["ipc", "shm", "disk"])
    parser.add_argument("--modes", nargs="+", default=["keep", "recompute"])
    parser.add_argument("--python", default=sys.executable, help="interpreter of vLLM's environment")
    parser.add_argument("--engine", default="vllm", choices=["vllm", "embedded"])
    parser.add_argument("--start-timeout", type=float, default=240.0, help="seconds a server may take to start")
    parser.add_argument("--graphs", action="store_true", help="let vLLM capture CUDA graphs: it starts slower")
    parser.add_argument("--quick", action="store_true", help="the tiny shape, on a CPU where there is no GPU")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="where snapshots are written")
    parser.add_argument("--seconds", type=float, default=420.0, help="no reading starts that would end later")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.shapes = ["tiny"]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with tempfile.TemporaryDirectory(dir=arguments.disk) as folder:
        bench = Bench(arguments=arguments, folder=Path(folder), device=device, end=time.monotonic() + arguments.seconds)
        end_at(arguments.seconds + 60, bench.write)
        bench.found = {
            "benchmark": "gpu_weight_sync",
            "command": " ".join(sys.argv),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "engine": arguments.engine,
            "engine_version": engine_version(arguments.python, arguments.engine),
            "shapes": {},
        }
        for name in arguments.shapes:
            bench.found["shapes"][name] = row = {}
            try:
                measure_shape(bench, PLANS[name], row)
            except Exception as error:  # the other shapes are still worth having
                row["failed"] = f"{type(error).__name__}: {error}"[-4000:]
                bench.say(f"{name}: {row['failed']}")
            bench.write()
    return 0 if all("failed" not in row for row in bench.found["shapes"].values()) else 1


def measure_shape(bench: Bench, plan: Plan, row: dict[str, Any]) -> None:
    """Fills ``row`` as readings come in."""
    shape = SYNC_SHAPES[plan.shape]
    began = time.monotonic()
    policy = Policy(shape, bench.device)
    policy.renew(0)
    row |= {"parameters": shape.parameters, "bytes": policy.nbytes, "requests": plan.requests}
    row["raw"] = raw_readings(policy.weights.values(), bench.folder)
    for kind, reading in row["raw"].items():
        bench.say(f"{plan.shape}: {kind}: {reading['seconds']:.3f} s, {reading['bytes_per_second'] / 1e9:.1f} GB/s")
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    model = write_model_folder(shape, bench.folder / plan.shape)
    bench.say(f"{plan.shape}: {policy.nbytes / 1e9:.2f} GB made in {time.monotonic() - began:.1f} s; starting a server")
    engine = bench.arguments.engine
    spec = server_spec(engine, model, "s0", **server_settings(bench, plan))
    with running(engine, spec, bench.folder, timeout=min(bench.left, bench.arguments.start_timeout)) as server:
        row["seconds_to_start"] = server.seconds_to_start
        bench.say(f"{plan.shape}: it serves after {server.seconds_to_start:.1f} s")
        row["updates"] = {}
        for transport in bench.arguments.transports:
            for mode in bench.arguments.modes:
                name = f"{transport}, {mode}"
                row["updates"][name] = reading = measure_way(bench, plan, policy, server, (transport, mode))
                bench.say(f"{plan.shape}: {name}: {line_of(reading)}")
                bench.write()
                if server.process.poll() is not None:
                    raise RuntimeError(f"the server ended:\n{server.said()}")
    del policy
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


def server_settings(bench: Bench, plan: Plan) -> dict[str, Any]:
    common: dict[str, Any] = {
        "dtype": "bfloat16",
        "context_length": 64 + plan.answer_tokens,
        "max_batch_size": plan.requests + 8,
    }
    on_gpu = bench.device.type == "cuda"
    if bench.arguments.engine == "embedded":
        return common | {"device": bench.device.type}
    ours = common | {"python": bench.arguments.python, "start_timeout": bench.arguments.start_timeout}
    if not on_gpu:
        return ours | {"flags": {"load_format": "dummy"}}
    total = torch.cuda.get_device_properties(bench.device).total_memory
    flags = {
        "load_format": "dummy",
        "gpu_memory_utilization": round(plan.server_bytes / total, 3),
        "enforce_eager": not bench.arguments.graphs,
    }
    transport = "ipc" if "ipc" in bench.arguments.transports else "shm"
    return ours | {"flags": flags, "devices": ("cuda:0",), "transport": transport}


def measure_way(bench: Bench, plan: Plan, policy: Policy, server: Server, way: tuple[str, str]) -> dict[str, Any]:
    """One transport and mode; never raises for what goes wrong there."""
    reason = not_run(bench, way[0], policy.nbytes)
    if reason:
        return {"not_run": reason}
    try:
        return asyncio.run(updates_under_load(bench, plan, policy, server, way))
    except Exception as error:  # one way that fails leaves the others
        return {"failed": f"{type(error).__name__}: {error}"[-2000:], "log": server.said()[-1500:]}


def not_run(bench: Bench, transport: str, nbytes: int) -> str:
    """Why this transport cannot be measured here, or nothing."""
    if bench.left < LEAST_SECONDS:
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


async def updates_under_load(
    bench: Bench, plan: Plan, policy: Policy, server: Server, way: tuple[str, str]
) -> dict[str, Any]:
    kind, mode = TransportKind(way[0]), InterruptMode(way[1])
    count = plan.host_updates if way[0] in ("shm", "disk") else plan.updates
    settings = Way(kind=kind, mode=mode, incarnation=0)
    rows: list[dict[str, Any]] = []
    async with asyncio.timeout(max(bench.left, 1.0)), open_line(policy, settings, bench.folder) as line:
        await line.add(server)
        bench.versions += 1
        first = await line.update(bench.versions)  # the way opens, buffers are made
        load = Load(line, plan.requests, plan.answer_tokens)
        at_work = await load.start()
        try:
            for _ in range(count):
                if rows and bench.left < LEAST_SECONDS:
                    break
                bench.versions += 1
                rows.append(await line.update(bench.versions))
        finally:
            answers = await load.stop()
    return summary(rows) | {"first": first, "running": at_work, "answers": answers, "readings": rows}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    middle = {key: median(row[key] for row in rows) for key in ("exported", "staged", "paused", "whole")}
    return {
        **middle,
        "bytes": rows[0]["bytes"],
        "bytes_per_second": rows[0]["bytes"] / middle["whole"],
        "bytes_per_paused_second": rows[0]["bytes"] / middle["paused"],
        "right": all(row["right"] for row in rows),
    }


def line_of(reading: dict[str, Any]) -> str:
    if "readings" not in reading:
        return json.dumps(reading)[:1500]
    seconds = ", ".join(f"{key} {reading[key]:.3f}" for key in ("exported", "staged", "paused", "whole"))
    answers = reading["answers"]
    return (
        f"{seconds} s; {reading['bytes_per_second'] / 1e9:.2f} GB/s; {reading['running']} running, "
        f"{answers['answers']} answers {'all whole' if answers['whole'] else 'NOT WHOLE ' + str(answers['wrong'])}; "
        f"weights {'right' if reading['right'] else 'WRONG'} (apart {reading['readings'][-1]['apart']:.3f}, "
        f"stale would be {reading['readings'][-1]['apart_before'] or 0:.2f})"
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1" if not torch.cuda.is_available() else "8")
    sys.exit(main())
