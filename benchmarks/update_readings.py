"""One reading of weight updates under running requests, and what the benchmarks that take it share.

Used by gpu/weight_sync.py, gpu/two_gpu.py and gpu/two_gpu_deaths.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from broadcast_watch import watched_broadcasts
from demo_runs import write_result
from sync_policy import SYNC_SHAPES, Policy, write_model_folder
from sync_runs import Line, Load, Way, open_line
from sync_servers import Server, end_at, engine_version, running, server_spec

from areal_like.errors import ConfigError

#: seconds that a reading must have left to begin: exporting and hashing 12 GB on a path through the host takes these
LEAST_SECONDS = 40.0
#: seconds between "start nothing any more" and the hard end
_GRACE = 60.0
MODES = ("keep", "recompute")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one shape is measured with. ``server_bytes`` is the server's share of a GPU that the trainer uses, too."""

    shape: str
    requests: int
    answer_tokens: int
    updates: int
    host_updates: int
    server_bytes: float = 0.0


PLANS = {
    "tiny": Plan(shape="tiny", requests=8, answer_tokens=48, updates=2, host_updates=2),
    "135m": Plan(shape="135m", requests=256, answer_tokens=512, updates=5, host_updates=3, server_bytes=24e9),
    "6b": Plan(shape="6b", requests=256, answer_tokens=256, updates=4, host_updates=3, server_bytes=64e9),
}


@dataclass(slots=True, kw_only=True)
class Bench:
    """What all readings of a benchmark share. ``versions`` counts those that were published."""

    options: argparse.Namespace
    folder: Path
    device: torch.device
    end: float
    found: dict[str, Any] = field(default_factory=dict)
    versions: int = 0

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def write(self) -> None:
        """Whatever was found so far."""
        if self.options.out is not None:
            write_result(self.options.out, self.found)

    def say(self, text: str) -> None:
        print(f"[{self.left:6.0f} s left] {text}", flush=True)

    def next_version(self) -> int:
        self.versions += 1
        return self.versions


def add_options(parser: argparse.ArgumentParser, *, seconds: float) -> None:
    """What every such benchmark takes."""
    parser.add_argument("--python", default=sys.executable, help="interpreter of vLLM's environment")
    parser.add_argument("--engine", default="vllm", choices=["vllm", "embedded"])
    parser.add_argument("--start-timeout", type=float, default=240.0, help="seconds a server may take to start")
    parser.add_argument("--graphs", action="store_true", help="let vLLM capture CUDA graphs: it starts slower")
    parser.add_argument("--quick", action="store_true", help="the tiny shape, on a CPU where there are no GPUs")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="where snapshots are written")
    parser.add_argument("--seconds", type=float, default=seconds, help="nothing starts that would end later")
    parser.add_argument("--out", type=Path, help="JSON, written after each reading")


def check_engine(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """The engine is installed where it is said to be.

    Raises:
        SystemExit: otherwise, with one sentence.
    """
    try:
        if options.engine == "embedded" or engine_version(options.python, options.engine):
            return
    except ConfigError as error:
        parser.error(str(error))
    parser.error(
        f"--python {options.python}: {options.engine} is not installed there; install it, name the interpreter of its "
        "environment (make engines makes .venv-vllm/bin/python), or take the embedded engine: --engine embedded"
    )


@contextmanager
def bench_of(name: str, options: argparse.Namespace, gpu: int) -> Iterator[Bench]:
    """``gpu``: the trainer's. A hard limit ends everything a minute after the time is over."""
    device = torch.device("cuda", gpu) if torch.cuda.is_available() else torch.device("cpu")
    with tempfile.TemporaryDirectory(dir=options.disk) as folder:
        bench = Bench(options=options, folder=Path(folder), device=device, end=time.monotonic() + options.seconds)
        end_at(options.seconds + _GRACE, bench.write)
        bench.found = {
            "benchmark": name,
            "command": " ".join(sys.argv),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "engine": options.engine,
            "engine_version": engine_version(options.python, options.engine),
        }
        yield bench


def make_policy(bench: Bench, plan: Plan) -> Policy:
    policy = Policy(SYNC_SHAPES[plan.shape], bench.device)
    policy.renew(0)
    return policy


@contextmanager
def serving(bench: Bench, plan: Plan, *, name: str = "s0", shared: bool, transport: str) -> Iterator[Server]:
    """A server of dummy weights on the first GPU. ``shared``: the trainer uses that GPU, too."""
    model = bench.folder / plan.shape
    if not model.exists():
        write_model_folder(SYNC_SHAPES[plan.shape], model)
    options = bench.options
    settings = _settings(bench, plan, shared=shared, transport=transport)
    spec = server_spec(options.engine, model, name, **settings)
    bench.say(f"{plan.shape}: starting {options.engine}")
    with running(options.engine, spec, bench.folder, timeout=min(bench.left, options.start_timeout)) as server:
        bench.say(f"{plan.shape}: {name} serves after {server.seconds_to_start:.1f} s")
        yield server


def _settings(bench: Bench, plan: Plan, *, shared: bool, transport: str) -> dict[str, Any]:
    common: dict[str, Any] = {
        "dtype": "bfloat16",
        "context_length": 64 + plan.answer_tokens,
        "max_batch_size": plan.requests + 8,
    }
    options = bench.options
    if options.engine == "embedded":
        return common | {"device": bench.device.type}
    ours = common | {"python": options.python, "start_timeout": options.start_timeout, "transport": transport}
    if bench.device.type == "cpu":
        return ours | {"flags": {"load_format": "dummy"}}
    total = torch.cuda.get_device_properties(0).total_memory
    flags = {
        "load_format": "dummy",
        "gpu_memory_utilization": round(plan.server_bytes / total, 3) if shared else 0.7,
        "enforce_eager": not options.graphs,
    }
    return ours | {"flags": flags, "devices": ("cuda:0",)}


async def updates_under_load(bench: Bench, plan: Plan, policy: Policy, server: Server, way: Way) -> dict[str, Any]:
    """Publish versions of random weights while ``plan.requests`` answers are being written; medians, and every row.

    The first update, which opens the way and makes buffers, goes before the load and does not count.
    """
    count = plan.host_updates if way.kind in ("shm", "disk") else plan.updates
    rows: list[dict[str, Any]] = []
    async with asyncio.timeout(max(bench.left, 1.0)), open_line(policy, way, bench.folder) as line:
        await line.add(server)
        first = await line.update(bench.next_version())  # the way opens, buffers are made
        load = Load(line, plan.requests, plan.answer_tokens)
        at_work = await load.start()
        try:
            for _ in range(count):
                if rows and bench.left < LEAST_SECONDS:
                    break
                rows.append(await _timed(line, bench.next_version()))
        finally:
            answers = await load.stop()
    return summary(rows) | {"first": first, "running": at_work, "answers": answers, "readings": rows}


async def _timed(line: Line, version: int) -> dict[str, Any]:
    """An update, and the seconds that its broadcast took where there was one."""
    with watched_broadcasts() as seen:
        row = await line.update(version)
    return row | ({"broadcast": seen.seconds} if seen.seconds else {})


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    keys = [key for key in ("exported", "staged", "broadcast", "paused", "whole") if key in rows[0]]
    middle = {key: median(row[key] for row in rows) for key in keys}
    parts = [row.get("paused_for", {}) for row in rows]
    return {
        **middle,
        "paused_for": {part: median(found.get(part, 0.0) for found in parts) for part in parts[0]},
        "bytes": rows[0]["bytes"],
        "bytes_per_second": rows[0]["bytes"] / middle["whole"],
        "bytes_per_paused_second": rows[0]["bytes"] / middle["paused"],
        "right": all(row["right"] for row in rows),
    }


def parts_of(reading: dict[str, Any]) -> str:
    """Where the seconds of the pause went, in milliseconds: the control's calls, and what the engine says of them."""
    parts = reading.get("paused_for", {})
    return ", ".join(f"{part} {1e3 * seconds:.0f}" for part, seconds in parts.items()) or "its parts are not told"


def line_of(reading: dict[str, Any]) -> str:
    if "readings" not in reading:
        return json.dumps(reading)[:1500]
    keys = [key for key in ("exported", "staged", "broadcast", "paused", "whole") if key in reading]
    seconds = ", ".join(f"{key} {reading[key]:.3f}" for key in keys)
    answers = reading["answers"]
    return (
        f"{seconds} s; paused for (ms): {parts_of(reading)}; "
        f"{reading['bytes_per_second'] / 1e9:.2f} GB/s; {reading['running']} running, "
        f"{answers['answers']} answers {'all whole' if answers['whole'] else 'NOT WHOLE ' + str(answers['wrong'])}; "
        f"weights {'right' if reading['right'] else 'WRONG'} (apart {reading['readings'][-1]['apart']:.3f}, "
        f"stale would be {reading['readings'][-1]['apart_before'] or 0:.2f})"
    )
