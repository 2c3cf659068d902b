"""How long an update takes on a CPU: seconds staged, seconds paused and bytes/s for every engine and transport.

    python benchmarks/weight_sync.py [--engines embedded vllm sglang] [--model models/smollm2] [--out FILE]

The trainer is this process; the server writes ``--load`` answers meanwhile, all of which must come back whole. Beside
them, in the same run, what the hardware does with the same bytes: a plain copy in memory, and our broadcast to a reader
over loopback. One thread each. An engine whose environment is missing is listed as not run.

A pause of the embedded engine is one copy beside the decode loop: ``of_raw_copy`` is its ratio to the plain copy. The
other engines load and repack while they are paused, and that is the floor of theirs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from demo_runs import write_result  # noqa: E402
from raw_copies import copy_seconds  # noqa: E402
from sync_runs import Load, Way, open_line  # noqa: E402
from sync_servers import Server, end_at, running, server_spec  # noqa: E402

from areal_like.api.weights import InterruptMode, TransportKind  # noqa: E402
from areal_like.weights.digest import parse_dtype  # noqa: E402
from areal_like.weights.transports.base import make_reader, make_writer  # noqa: E402
from launcher.engine_facts import default_python, find_engine  # noqa: E402

TRANSPORTS = ("shm", "disk", "collective")
ENGINES = ("embedded", "vllm", "sglang")
CONTEXT, BATCH = 512, 64
#: seconds between "start nothing any more" and the hard end
GRACE = 30.0
SHOWN = ("exported", "staged", "paused", "whole")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A checkpoint, published again and again: what a channel and a load need of a policy."""

    weights: dict[str, torch.Tensor]
    shape: Any
    device: torch.device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.weights.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--transports", nargs="+", default=list(TRANSPORTS), choices=TRANSPORTS)
    parser.add_argument("--mode", default="keep", choices=["keep", "recompute"])
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--load", type=int, default=4, help="answers that are being written meanwhile")
    parser.add_argument("--seconds", type=float, default=330.0, help="nothing starts later than this")
    parser.add_argument("--out", type=Path, help="JSON, written after each reading")
    options = parser.parse_args()
    torch.set_num_threads(1)
    weights = read_weights(options.model)
    rows: dict[str, Any] = {}
    found = {
        "benchmark": "weight_sync",
        "command": " ".join(sys.argv),
        "model": options.model.name,
        "bytes": weights.nbytes,
        "load": options.load,
        "mode": options.mode,
        "engines": rows,
    }

    def write() -> None:
        if options.out is not None:
            write_result(options.out, found)

    end = time.monotonic() + options.seconds
    end_at(options.seconds + GRACE, write)
    print(f"{options.model}, {weights.nbytes / 1e6:.0f} MB, {options.load} answers in flight")
    for engine in options.engines:
        rows[engine] = {}
        try:
            measure_engine(options, engine, weights, rows[engine], end)
        except Exception as error:  # the other engines are still worth having
            rows[engine]["failed"] = f"{type(error).__name__}: {error}"[-2000:]
            print(f"{engine}: {rows[engine]['failed']}", flush=True)
        write()
    return status_of(rows.values())


def status_of(rows: Collection[Mapping[str, Any]]) -> int:
    """1 if an engine failed, or none was measured."""
    return 1 if any("failed" in row for row in rows) or all("not_run" in row for row in rows) else 0


def measure_engine(options: argparse.Namespace, engine: str, weights: Weights, row: dict[str, Any], end: float) -> None:
    """Fills ``row`` with the raw readings, and one entry a transport."""
    facts = find_engine(engine)
    if facts.capabilities is None or time.monotonic() > end:
        row["not_run"] = facts.trouble or "the time was over"
        print(f"{engine}: not run: {row['not_run']}", flush=True)
        return
    row["version"] = facts.capabilities.version
    row["raw_copy"] = copy_seconds(weights.weights.values(), options.updates)
    row["raw_broadcast"] = raw_broadcast(weights, options.updates)
    print(f"{engine}: raw copy {row['raw_copy']:.3f} s, raw broadcast {row['raw_broadcast']:.3f} s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        spec = spec_of(engine, options.model, end)
        with running(engine, spec, Path(folder), timeout=max(end - time.monotonic(), 1.0)) as server:
            row["seconds_to_start"] = server.seconds_to_start
            for name in options.transports:
                if time.monotonic() > end:
                    row[name] = {"not_run": "the time was over"}
                    continue
                row[name] = reading = asyncio.run(measure(options, TransportKind(name), server, weights, Path(folder)))
                reading["of_raw_copy"] = reading["paused"] / row["raw_copy"]
                shown = ", ".join(f"{key} {reading[key]:.3f}" for key in SHOWN)
                print(
                    f"{engine:9} {name:11} {shown} s; {reading['bytes_per_second'] / 1e6:.0f} MB/s; paused "
                    f"{reading['of_raw_copy']:.2f} of a raw copy; answers whole: {reading['answers']['whole']}",
                    flush=True,
                )


async def measure(
    options: argparse.Namespace, kind: TransportKind, server: Server, weights: Weights, folder: Path
) -> dict[str, Any]:
    """Publish some versions over one transport; medians. The first, for which buffers are made, does not count."""
    policy: Any = weights
    first = time.time_ns() // 10**9  # newer than what earlier transports published
    async with open_line(policy, Way(kind=kind, mode=InterruptMode(options.mode)), folder) as line:
        await line.add(server)
        await line.publish(first)
        load = Load(line, options.load, CONTEXT // 4)
        running_now = await load.start()
        try:
            rows = [await line.publish(first + number) for number in range(1, options.updates + 1)]
        finally:
            answers = await load.stop()
    middle = {key: median(row[key] for row in rows) for key in SHOWN}
    return middle | {
        "paused_of_each": [row["paused"] for row in rows],
        "bytes": rows[0]["bytes"],
        "bytes_per_second": rows[0]["bytes"] / middle["whole"],
        "running": running_now,
        "answers": answers,
    }


def raw_broadcast(weights: Weights, times: int) -> float:
    """Median seconds from the trainer's packed copy to a reader of the same process, over loopback."""
    writer = make_writer(TransportKind.COLLECTIVE, run_id="raw", directory=Path())

    def once() -> float:
        began = time.perf_counter()
        with make_reader(manifest) as reader:
            for entry in manifest.tensors:
                reader.read_into(entry, torch.empty(entry.shape, dtype=parse_dtype(entry.dtype)))
        return time.perf_counter() - began

    try:
        manifest = writer.write(1, 0, weights.weights.items())
        return median(once() for _ in range(times))
    finally:
        writer.close()


def read_weights(folder: Path) -> Weights:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if not found:
        raise SystemExit(f"{folder} holds no safetensors files; python -m launcher.smollm2 {folder}")
    vocabulary = found["model.embed_tokens.weight"].shape[0]
    return Weights(weights=found, shape=SimpleNamespace(vocabulary=vocabulary), device=torch.device("cpu"))


def spec_of(engine: str, model: Path, end: float) -> Any:
    common: dict[str, Any] = {"dtype": "bfloat16", "context_length": CONTEXT, "max_batch_size": BATCH}
    if engine != "embedded":
        common |= {"python": default_python(engine), "start_timeout": max(end - time.monotonic(), 1.0)}
    return server_spec(engine, model.absolute(), "s0", **common)


if __name__ == "__main__":
    sys.exit(main())
