"""How long an update takes: seconds staged, seconds paused and bytes/s for every transport and engine.

    python benchmarks/weight_sync.py --engine vllm --model models/smollm2 --updates 5

Beside them, in the same run, what the hardware does with the same bytes: a plain copy in memory, and a broadcast over
loopback. The trainer is this process; the server is idle, or writes ``--load`` answers meanwhile. One thread each.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors import safe_open

from areal_like.api.generation import GenerationHyperparameters, ModelRequest
from areal_like.api.weights import CommitReceipt, InterruptMode, Manifest, TransportKind
from areal_like.client.generation import RemoteEngine
from areal_like.client.pool import ServerPool
from areal_like.inference.backends import get_backend, get_engine
from areal_like.inference.backends.base import LinkSettings
from areal_like.inference.spec import EngineSpec, InferenceServerSpec
from areal_like.weights.channel import WeightChannel
from areal_like.weights.digest import parse_dtype
from areal_like.weights.transports.base import WeightWriter, make_reader, make_writer
from launcher.engine_facts import default_python
from launcher.environments import installed_version

TOKEN = secrets.token_urlsafe(16)
CONTEXT = 512
PLAY = """
import sys
from areal_like.inference.spec import EngineSpec, InferenceServerSpec
kind, spec, token = sys.argv[1:]
ready = lambda url: print("READY", url, flush=True)
if kind == "embedded":
    from areal_like.inference.embedded.server import run_server
    run_server(InferenceServerSpec.model_validate_json(spec), token, ready)
else:
    from launcher.engine_process import run_engine
    run_engine(EngineSpec.model_validate_json(spec), token, ready)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """Exports the same tensors as every version."""

    writer: WeightWriter
    weights: dict[str, torch.Tensor]

    async def export_weights(self, version: int, incarnation: int) -> Manifest:
        return await asyncio.to_thread(self.writer.write, version, incarnation, self.weights.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--engine", default="embedded", choices=["embedded", "vllm", "sglang"])
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--transport", nargs="*", default=[str(kind) for kind in TransportKind])
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--load", type=int, default=0, help="answers that are being written meanwhile")
    arguments = parser.parse_args()
    weights = read_weights(arguments.model)
    size = sum(tensor.nbytes for tensor in weights.values())
    print(f"{arguments.engine}, {arguments.model}, {size / 1e6:.0f} MB, {arguments.load} answers in flight")
    print(f"{'raw copy':12} {raw_copy(weights, arguments.updates):8.3f} s")
    print(f"{'raw group':12} {raw_broadcast(weights, arguments.updates):8.3f} s")
    print(f"{'transport':12} {'exported':>9} {'staged':>9} {'paused':>9} {'whole':>9} {'MB/s':>7}")
    with server(arguments.engine, arguments.model) as url:
        for name in arguments.transport:
            asyncio.run(measure(arguments, TransportKind(name), url, weights))


async def measure(
    arguments: argparse.Namespace, kind: TransportKind, url: str, weights: dict[str, torch.Tensor]
) -> None:
    """Publish some versions over one transport and print the medians."""
    backend = get_backend(arguments.engine)
    version = await backend.version(url, token=TOKEN, timeout=30)
    link = backend.connect("s0", url, LinkSettings(token=TOKEN, version=version, transport=kind))
    receipts: list[CommitReceipt] = []
    wholes: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        writer = make_writer(kind, run_id=f"sync-{secrets.token_hex(3)}", directory=Path(folder))
        try:
            async with ServerPool() as pool, RemoteEngine(pool, token=TOKEN) as engine:
                await pool.add("s0", url, link.control, link.dialect)
                trainer = Trainer(writer=writer, weights=weights)
                channel = WeightChannel(trainer, pool, interrupt=InterruptMode.KEEP)
                first = time.time_ns() // 10**9  # newer than what earlier transports published
                await channel.publish(first)
                load = [asyncio.create_task(keep_writing(engine)) for _ in range(arguments.load)]
                exported = channel.statistics().seconds_exported
                for number in range(1, arguments.updates + 1):
                    began = time.perf_counter()
                    receipts += await channel.publish(first + number)
                    wholes.append(time.perf_counter() - began)
                exported = (channel.statistics().seconds_exported - exported) / arguments.updates
                for task in load:
                    task.cancel()
                await asyncio.gather(*load, return_exceptions=True)
        finally:
            writer.close()
    staged, paused = (median(getattr(r, key) for r in receipts) for key in ("seconds_staged", "seconds_paused"))
    speed = receipts[-1].bytes / median(wholes) / 1e6
    print(f"{kind.value:12} {exported:9.3f} {staged:9.3f} {paused:9.3f} {median(wholes):9.3f} {speed:7.0f}", flush=True)


async def keep_writing(engine: RemoteEngine) -> None:
    settings = GenerationHyperparameters(max_new_tokens=CONTEXT // 2, ignore_eos=True)
    while True:
        await engine.agenerate(ModelRequest(input_ids=[10, 11, 12], gconfig=settings))


def raw_copy(weights: dict[str, torch.Tensor], times: int) -> float:
    """Median seconds to copy every tensor into one that is there already."""
    targets = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    return median(seconds(lambda: [targets[name].copy_(tensor) for name, tensor in weights.items()], times))


def raw_broadcast(weights: dict[str, torch.Tensor], times: int) -> float:
    """Median seconds from the trainer to a reader of the same process, over loopback."""
    writer = make_writer(TransportKind.COLLECTIVE, run_id="raw", directory=Path())

    def once() -> None:
        with make_reader(manifest) as reader:
            for entry in manifest.tensors:
                reader.read_into(entry, torch.empty(entry.shape, dtype=parse_dtype(entry.dtype)))

    try:
        manifest = writer.write(1, 0, weights.items())
        return median(seconds(once, times))
    finally:
        writer.close()


def seconds(work: object, times: int) -> Iterator[float]:
    assert callable(work)
    for _ in range(times):
        began = time.perf_counter()
        work()
        yield time.perf_counter() - began


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return weights


@contextmanager
def server(engine: str, model: Path) -> Iterator[str]:
    """One server in a process of its own, gone afterwards."""
    command = [sys.executable, "-c", PLAY, engine, spec_of(engine, model), TOKEN]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        ready = next((line.split() for line in process.stdout if line.startswith("READY")), None)
        if ready is None:
            raise SystemExit(f"{engine} did not start; try areal-like serve")
        yield ready[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def spec_of(engine: str, model: Path) -> str:
    if engine == "embedded":
        return InferenceServerSpec(
            name="s0", model_path=str(model), dtype="bfloat16", context_length=CONTEXT
        ).model_dump_json()
    python = default_python(engine)
    return EngineSpec(
        backend="vllm" if engine == "vllm" else "sglang",
        name="s0",
        python=python,
        version=installed_version(python, get_engine(engine).package),
        model_path=str(model),
        context_length=CONTEXT,
        max_batch_size=64,
    ).model_dump_json()


if __name__ == "__main__":
    main()
