"""Synchronous against asynchronous on two GPUs, vLLM on one and the trainer on the other: η = 0, 2, 4, equal steps.

    python benchmarks/gpu/two_gpu_async.py --python .venv-vllm-gpu/bin/python --steps 60 --seconds 1200 [--out FILE]
    python benchmarks/gpu/two_gpu_async.py --quick --device cpu --engine embedded      # a dry run

Both need models/smollm2 (``make smollm2``), and the first vLLM in an environment of its own, whose interpreter is
``--python``. 60 steps of the three η took 1,019 s with all starts, on two H200s; each of ``--seeds`` takes that again.

SmolLM2-135M learns sums (``workflows/long_tail.py``): lengths per prompt are log-normal, from 32 to 2,048 tokens. A
synchronous step waits for the longest answer of its batch while the trainer stands still. Told of each η: step time,
busy share of both GPUs, tokens/s, rewards, requests in flight at a commit; and how much faster than η = 0: in the
steady steps, in all steps, and by tokens/s, for at its end an asynchronous run lives off what it had generated before.
Nothing is said of speed where a run has fewer than three steady steps, or generated no tokens in them.
A seed decides the order of the prompts, what is sampled and how minibatches are cut; lengths and model are the same.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.demo_runs import ROOT
from benchmarks.gpu.gpu_meter import GpuMeter
from benchmarks.gpu.live_runs import (
    TWO_GPUS,
    Experiment,
    Report,
    add_seeds,
    check_machine,
    check_seeds,
    engine_facts,
    engine_overrides,
    limit_time,
    run_or_fall_back,
    vllm_flags,
)
from benchmarks.gpu.refusals import check_counts, check_experiment, check_limits, check_model
from benchmarks.gpu.run_figures import step_figures
from workflows.additions import Task, write

ETAS = (0, 2, 4)
#: seconds from the start of a run to its first step, and of a step: guesses from which the steps are chosen
_START, _SYNC_STEP, _ASYNC_STEP = 60.0, 8.0, 4.5
_FEWEST, _MOST = 8, 40
#: a run with fewer steady steps tells no speed
_STEADY = 3
#: between a run's η and its seed, in its name
_SEED = ", seed "


def steps_within(seconds: float, etas: Sequence[int] = ETAS) -> int:
    """Equal steps for every η that should fit into the budget."""
    left = seconds - len(etas) * _START
    each = sum(_ASYNC_STEP if eta else _SYNC_STEP for eta in etas)
    return min(max(int(left / each), _FEWEST), _MOST)


def overrides(eta: int, seed: int, given: argparse.Namespace, data: Path, steps: int, *, fallback: bool) -> list[str]:
    """Of the two-GPU recipe."""
    facts = engine_facts(given.device, given.python, engine=given.engine)
    batch, samples = (4, 2) if given.quick else (32, 8)
    found = [
        *engine_overrides(given.device, facts, engine=given.engine),
        f"weights.transport={'shm' if fallback else given.transport}",
        f"seed={seed}",
        f"model.path={given.smollm2}",
        f"train_dataset.path={data}/train.jsonl",
        f"train_dataset.batch_size={batch}",
        f"gconfig.n_samples={samples}",
        f"total_train_steps={steps}",
        f"rollout.max_head_offpolicyness={eta}",
        f"rollout.max_concurrent_rollouts={min((eta + 1) * batch, 128)}",
        "saver.at_end=false",
        "rollout.start_timeout=180",
    ]
    if given.device != "cpu" and given.engine == "vllm":
        found.append(vllm_flags(eager=fallback, gpu_memory_utilization=0.7, kv_cache_memory_bytes=round(60e9)))
    return [*found, *given.overrides]


def name_of(eta: int, seed: int | None = None) -> str:
    """``eta=2``, and ``, seed 3`` where there are several."""
    return f"eta={eta}" + ("" if seed is None else f"{_SEED}{seed}")


def compare(found: Mapping[str, Any]) -> dict[str, Any]:
    """Each η beside η = 0 of its seed: how much faster; rewards after equal ``steps``: difference and noise.

    ``faster_than_sync``: seconds of a steady step, η = 0 by η. ``faster_whole``: the same of the sums of all steps that
    both made, the first ones included. ``tokens_ratio``: tokens/s generated in the steady steps, η by η = 0. The last
    two are missing where a result does not tell seconds step by step, or tokens; all three, with the reason in
    ``no_ratios``, where one of the runs has too few steady steps or generated nothing in them.
    Where several seeds ran, ``over seeds`` has the means of those whose runs were not cut.
    """
    beside: dict[str, Any] = {}
    whole: dict[str, dict[int, Any]] = {}
    for name, run in found.items():
        eta, comma, seed = name.partition(_SEED)
        sync = found.get(name_of(0) + comma + seed)
        if eta != name_of(0) and _made_steps(run) and _made_steps(sync):
            beside[name] = {**_ratios(sync, run), **_rewards_beside(sync["reward"], run["reward"])}
            if seed and "failed" not in run and "failed" not in sync:
                whole.setdefault(eta, {})[int(seed)] = beside[name]
    several = {eta: _over_seeds(rows) for eta, rows in whole.items() if len(rows) > 1}
    return beside | ({"over seeds": several} if several else {})


def _ratios(sync: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """How much faster; or why that cannot be said."""
    for run in (sync, other):
        first, last = run.get("steady_steps", (1, _STEADY))
        if last - first + 1 < _STEADY:
            return {"no_ratios": f"a run has fewer than {_STEADY} steady steps"}
        if run.get("generated_tokens_per_second") == 0:
            return {"no_ratios": "a run generated no tokens in its steady steps"}
    found = {"faster_than_sync": round(sync["seconds_per_step"] / other["seconds_per_step"], 3)}
    seconds = [run.get("by_step", {}).get("step_seconds", ()) for run in (sync, other)]
    steps = min(map(len, seconds))
    before, after = (sum(each[:steps]) for each in seconds)
    if before and after:
        found["faster_whole"] = round(before / after, 3)
    tokens = [run.get("generated_tokens_per_second") for run in (sync, other)]
    if tokens[0] and tokens[1]:
        found["tokens_ratio"] = round(tokens[1] / tokens[0], 3)
    return found


def _made_steps(run: Any) -> bool:
    return isinstance(run, dict) and "seconds_per_step" in run


def _over_seeds(rows: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Of one η, by seed: means, and their standard errors (deviation of the sample, n - 1, by √n)."""
    told: dict[str, Any] = {"seeds": list(rows)}
    for name in ("faster_than_sync", "faster_whole", "tokens_ratio", "reward_difference"):
        if not all(name in row for row in rows.values()):
            continue
        values = [row[name] for row in rows.values()]
        told[name] = round(fmean(values), 4)
        told[f"{name}_error"] = round(stdev(values) / math.sqrt(len(values)), 4)
    return told


def _rewards_beside(sync: list[float], other: list[float]) -> dict[str, Any]:
    """Means of the last quarter, two steps at least, of the steps that both made, and the spread of the same steps."""
    steps = min(len(sync), len(other))
    before, after = (rewards[:steps][-max(2, steps // 4) :] for rewards in (sync, other))
    return {
        "steps": steps,
        "reward_difference": round(fmean(after) - fmean(before), 4),
        "reward_noise": _noise(before, after),
    }


def _noise(*ends: list[float]) -> float | None:
    """Standard error of the difference of the means; None where a single step tells no spread."""
    if any(len(end) < 2 for end in ends):
        return None
    return round(math.sqrt(sum(stdev(end) ** 2 / len(end) for end in ends)), 4)


def measure(given: argparse.Namespace, budget: float, out: Path | None) -> Report:
    """Every η with each seed that fits into ``budget`` seconds; the file ``out`` is written after each."""
    etas, seeds = etas_of(given), given.seeds
    steps = steps_of(given, budget)
    report = Report(out, "two_gpu_async", budget=budget, steps=steps, seeds=seeds, device=given.device)
    with tempfile.TemporaryDirectory() as name, GpuMeter() as gpus:
        folder = Path(name)
        write(folder / "data", Task(valid=8, longest=48, median=16, shortest=4) if given.quick else Task())
        runs: dict[str, Any] = {}
        for seed, eta in itertools.product(seeds, etas):

            def experiment(fallback: bool, eta: int = eta, seed: int = seed) -> Experiment:
                return Experiment(
                    config=TWO_GPUS,
                    overrides=overrides(eta, seed, given, folder / "data", steps, fallback=fallback),
                    trial=f"eta{eta}-seed{seed}",
                    runs=folder / "runs",
                    timeout=max(report.left, 1.0),
                )

            run = name_of(eta, seed if len(seeds) > 1 else None)
            found = report.part(
                run,
                lambda e=experiment, s=seed: {"seed": s, **step_figures(run_or_fall_back(e), gpus)},  # type: ignore[misc]
                needs=0.0 if given.quick else _START,
            )
            runs |= {run: found} if found is not None else {}
            report.put("comparison", compare(runs))
    return report


def etas_of(given: argparse.Namespace) -> Sequence[int]:
    return given.etas or ETAS[: 2 if given.quick else None]


def steps_of(given: argparse.Namespace, budget: float) -> int:
    """Of every run."""
    if given.steps is not None:
        return int(given.steps)
    return 2 if given.quick else steps_within(budget / len(given.seeds), etas_of(given))


def add_runs(parser: argparse._ActionsContainer) -> None:
    """What is run; two_gpu.py takes it for its part b."""
    parser.add_argument("--steps", type=int, help="of every run; default: as many as should fit into --seconds")
    parser.add_argument("--etas", type=int, nargs="+", help="in this order; 0 is compared with; default: 0 2 4")
    add_seeds(parser, "every η with each, one after the other")
    parser.add_argument("--transport", default="collective", choices=["collective", "shm", "disk"])
    parser.add_argument("--smollm2", type=Path, default=ROOT / "models" / "smollm2", help="make smollm2")
    parser.add_argument("overrides", nargs="*", help="key=value, for every run")


def check_runs(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Numbers, seeds and overrides with which every run can begin, and a model; told is what will not be used.

    Raises:
        SystemExit: otherwise, with one sentence.
    """
    check_seeds(parser, given)
    check_counts(parser, "--etas", etas_of(given), least=0)
    steps = steps_of(given, given.seconds)
    check_counts(parser, "--steps", [steps], least=1)
    seed = given.seeds[0]
    for eta in etas_of(given):
        asked = overrides(eta, seed, given, Path("data"), steps, fallback=False)
        config = check_experiment(parser, TWO_GPUS, asked)
        if (config.rollout.max_head_offpolicyness, config.seed, config.total_train_steps) != (eta, seed, steps):
            parser.error(f"{' '.join(given.overrides)}: η, seed and steps are given as --etas, --seeds and --steps")
        check_model(parser, Path(config.model.path))
    if 0 not in etas_of(given) or len(etas_of(given)) == 1:
        print("nothing will be compared: that needs --etas with 0 and another", flush=True)
    if given.engine == "embedded" and given.python not in (None, sys.executable):
        print(f"--python {given.python} is not used: the embedded engine runs in this environment", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_runs(parser)
    parser.add_argument("--engine", choices=["vllm", "embedded"], default="vllm")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--python", help="vLLM's interpreter; default: this one, on a CPU .venv-vllm's")
    parser.add_argument("--seconds", type=float, default=330.0, help="for everything; what runs then is cut")
    parser.add_argument("--quick", action="store_true", help="few rows; two steps, η = 0 and 2, unless told otherwise")
    parser.add_argument("--out", type=Path)
    return parser


def main() -> int:
    parser = _parser()
    given = parser.parse_args()
    check_limits(parser, given)
    check_machine(parser, given, [given.engine], instead="--engine embedded", gpus=2)
    if given.device == "cpu":
        given.transport = "shm"
    check_runs(parser, given)
    limit_time(given.seconds + 30.0)
    return measure(given, given.seconds, given.out).status


if __name__ == "__main__":
    sys.exit(main())
