"""Two GPUs of one host: vLLM on the first, the trainer on the second, weights over NCCL between them.

    python benchmarks/gpu/two_gpu.py --python .venv-vllm-gpu/bin/python [--parts a c d] [--seconds 540] [--out FILE]
    python benchmarks/gpu/two_gpu.py --python .venv-vllm-gpu/bin/python --parts b --steps 60 --seconds 1300 [KEY=VALUE]
    python benchmarks/gpu/two_gpu.py --quick --engine embedded                       # a dry run, on CPUs

a  updates of SmolLM2's and of a 6B shape under 256 running requests, each checked: seconds exporting, staging, paused,
   bytes/s; beside a plain torch.distributed broadcast of the same bytes between two processes in the same run
b  the same experiment synchronous and asynchronous (two_gpu_async.py), with models/smollm2 (``make smollm2``)
c  the server killed in the middle of a broadcast, and the trainer (two_gpu_deaths.py)
d  two FSDP2 ranks give what one gives (tests/gpu/test_two_ranks_cuda.py), and their MFU (train_step_ranks.py)

``--python`` is the interpreter of vLLM's environment. Results are written after every part and reading. Without GPUs
there is ``--quick`` alone: parts a and c over gloo, b through shared memory, d with a tiny shape.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
sys.path[:0] = [str(BENCHMARKS / "gpu"), str(BENCHMARKS), str(ROOT)]

from demo_runs import bound  # noqa: E402
from raw_broadcast import raw_broadcast  # noqa: E402
from step_shapes import SHAPES  # noqa: E402
from sync_policy import Policy  # noqa: E402
from sync_runs import Way  # noqa: E402
from sync_servers import Server  # noqa: E402
from two_gpu_deaths import deaths, way_of  # noqa: E402
from update_readings import (  # noqa: E402
    LEAST_SECONDS,
    MODES,
    PLANS,
    Bench,
    Plan,
    add_options,
    bench_of,
    line_of,
    make_policy,
    serving,
    updates_under_load,
)

from areal_like.api.weights import InterruptMode  # noqa: E402
from benchmarks.gpu.live_runs import check_machine  # noqa: E402
from benchmarks.gpu.refusals import check_folder, check_limits  # noqa: E402
from benchmarks.gpu.two_gpu_async import add_runs, check_runs, measure  # noqa: E402

#: the share of the time that is left which part b may take, and the seconds of part d's readings
SHARE_B, SECONDS_D = 0.9, 120.0
RAW_TIMES = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["a", "c", "d", "b"], choices=sorted(PARTS))
    parser.add_argument("--shapes", nargs="+", default=["135m", "6b"], choices=sorted(PLANS))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument(
        "--ranks-shapes", nargs="+", default=["1.5b"], choices=sorted(SHAPES), help="what is trained in part d"
    )
    parser.add_argument("--deaths-shape", default="6b", choices=sorted(PLANS), help="what is sent in part c")
    add_options(parser, seconds=540.0)
    add_runs(parser.add_argument_group("of part b"))
    options = parser.parse_args()
    check(parser, options)
    with bench_of("two_gpu", options, gpu=1) as bench:
        bench.found |= {"gpus": torch.cuda.device_count(), "torch": torch.__version__}
        for part in options.parts:
            if part in bench.found:  # done on the way
                continue
            bench.found[part] = {}
            attempt(bench, f"part {part}", bench.found[part], lambda row, part=part: PARTS[part](bench, row))
    return status_of(bench.found)


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Every part that is asked for can begin; ``--quick`` makes shapes tiny, and takes CPUs where there are no GPUs.

    Raises:
        SystemExit: otherwise, with one sentence.
    """
    check_limits(parser, options)
    check_folder(parser, "--disk", options.disk)
    if options.quick:
        options.shapes, options.deaths_shape = ["tiny"], "tiny"
    options.device = "cpu" if options.quick and not torch.cuda.device_count() else "cuda"
    if torch.cuda.device_count() == 1:
        parser.error("one GPU is not enough: NCCL wants one for each process; see weight_sync.py")
    engines = [options.engine] if {"a", "b", "c"} & set(options.parts) else []
    check_machine(parser, options, engines, instead="--engine embedded", gpus=2, dry="--quick")
    if options.device == "cpu":
        options.transport = "shm"
    if "b" in options.parts:
        check_runs(parser, options)
    elif options.overrides or options.steps is not None or options.etas is not None:
        parser.error("--steps, --etas and key=value are part b's, and --parts leaves it out")


def status_of(found: dict[str, Any]) -> int:
    """1 where something went wrong, or no part measured anything."""
    return 1 if went_wrong(found) or not any(measured(found.get(part)) for part in PARTS) else 0


def measured(row: Any) -> bool:
    """Anything but reasons why not."""
    if isinstance(row, dict):
        return "not_run" not in row and any(map(measured, row.values()))
    return row is not None


def went_wrong(found: Any) -> bool:
    """Anywhere in the results: a part that failed, wrong weights, an answer that was cut short, a promise not held."""
    if isinstance(found, dict):
        broken = "failed" in found or any(found.get(key) is False for key in ("right", "whole", "held", "tests_passed"))
        return broken or any(map(went_wrong, found.values()))
    return isinstance(found, list) and any(map(went_wrong, found))


def attempt(bench: Bench, what: str, row: dict[str, Any], work: Callable[[dict[str, Any]], None]) -> None:
    """What fails leaves the rest; what it had found stays."""
    if bench.left < LEAST_SECONDS:
        row["not_run"] = "the time was over"
    else:
        try:
            work(row)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"[-3000:]
            row["traceback"] = traceback.format_exc()[-2000:]
    bench.say(f"{what}: {row.get('failed') or row.get('not_run') or 'done'}")
    bench.write()


# -- a: updates --


def part_a(bench: Bench, row: dict[str, Any]) -> None:
    for name in bench.options.shapes:
        row[name] = {}
        attempt(bench, name, row[name], lambda found, name=name: measure_shape(bench, PLANS[name], found))


def measure_shape(bench: Bench, plan: Plan, row: dict[str, Any]) -> None:
    backend = "nccl" if bench.device.type == "cuda" else "gloo"
    row["raw"] = raw = raw_broadcast(plan.shape, backend, RAW_TIMES, timeout=120)
    for kind, reading in raw.items():
        bench.say(f"{plan.shape}: raw {kind}: {reading['seconds']:.3f} s, {reading['bytes_per_second'] / 1e9:.1f} GB/s")
    policy = make_policy(bench, plan)
    row |= {"parameters": policy.shape.parameters, "bytes": policy.nbytes, "requests": plan.requests, "updates": {}}
    with serving(bench, plan, shared=False, transport="collective") as server:
        row["seconds_to_start"] = server.seconds_to_start
        for mode in bench.options.modes:
            found: dict[str, Any] = {}
            row["updates"][mode] = found
            attempt(
                bench,
                f"{plan.shape}, {mode}",
                found,
                lambda f, m=mode: f.update(_updates(bench, plan, policy, server, m)),
            )
            bench.say(f"{plan.shape}, {mode}: {line_of(found)}")
            if "paused" in found:
                found["of_raw"] = _of_raw(found, raw)
                bench.say(f"{plan.shape}, {mode}: of the fastest raw broadcast's bytes/s: {found['of_raw']}")
            if server.ended():
                raise RuntimeError(f"the server ended:\n{server.said()}")
        if "c" in bench.options.parts and plan.shape == bench.options.deaths_shape:  # a server's start is saved
            bench.found["c"] = {}
            attempt(bench, "part c", bench.found["c"], lambda f: asyncio.run(deaths(bench, plan, policy, server, f)))


def _updates(bench: Bench, plan: Plan, policy: Policy, server: Server, mode: str) -> dict[str, Any]:
    over = way_of(plan, bench.device, 0)
    way = Way(kind=over.kind, group=over.group, mode=InterruptMode(mode))
    return asyncio.run(updates_under_load(bench, plan, policy, server, way))


def _of_raw(found: dict[str, Any], raw: dict[str, Any]) -> dict[str, float]:
    """Bytes/s by the fastest raw broadcast's: of the broadcast alone, and of the whole pause around it."""
    best = max(reading["bytes_per_second"] for reading in raw.values())
    return {key: found["bytes"] / found[key] / best for key in ("broadcast", "paused") if key in found}


# -- b, c, d --


def part_b(bench: Bench, row: dict[str, Any]) -> None:
    out = bench.folder / "async.json" if bench.options.out is None else bench.options.out.with_suffix(".async.json")
    report = measure(bench.options, SHARE_B * bench.left, out)
    row |= report.found
    if not report.measured:
        row["not_run"] = "no run had the time that it needs"


def part_c(bench: Bench, row: dict[str, Any]) -> None:
    """On a server of its own, where part a did not do it on its way."""
    plan = PLANS[bench.options.deaths_shape]
    policy = make_policy(bench, plan)
    with serving(bench, plan, shared=False, transport="collective") as server:
        asyncio.run(deaths(bench, plan, policy, server, row))


def part_d(bench: Bench, row: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, f"--rootdir={ROOT}", "--import-mode=importlib"]
    tests = subprocess.run(
        bound([*command, "-p", "no:cacheprovider", "tests/gpu/test_two_ranks_cuda.py"]),
        cwd=ROOT, capture_output=True, text=True, timeout=max(bench.left, 1), check=False,
    )  # fmt: skip
    row["tests_said"] = tests.stdout[-1500:]
    if "passed" in tests.stdout or "failed" in tests.stdout:  # else they were skipped: no GPUs
        row["tests_passed"] = tests.returncode == 0
    bench.say(f"two ranks against one: {tests.stdout.strip().splitlines()[-1:]}")
    bench.write()
    out = bench.folder / "train_step_ranks.json"
    seconds = max(1.0, min(SECONDS_D, 0.8 * bench.left))
    words = ["--quick"] if bench.options.quick else ["--shapes", *bench.options.ranks_shapes]
    program = [sys.executable, str(BENCHMARKS / "gpu" / "train_step_ranks.py"), "--seconds", str(seconds)]
    command = bound([*program, *words, "--out", str(out)])
    ended = subprocess.run(command, cwd=ROOT, timeout=bench.left + 60, check=False)
    row["train_step"] = json.loads(out.read_text())
    if not row["train_step"]["readings"] and "tests_passed" not in row:
        row["not_run"] = "no reading had the time that it needs, and the tests were skipped"
    if ended.returncode:
        raise RuntimeError(f"train_step_ranks.py ended with {ended.returncode}; its readings say which")


PARTS: dict[str, Callable[[Bench, dict[str, Any]], None]] = {"a": part_a, "b": part_b, "c": part_c, "d": part_d}


if __name__ == "__main__":
    sys.exit(main())
