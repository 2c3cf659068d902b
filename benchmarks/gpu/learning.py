"""Learning with a real model on one GPU: SmolLM2-135M-Instruct, sums, GRPO; η in {0, 2, 8}, naive PPO and decoupled.

    python benchmarks/gpu/learning.py [--seconds 480] [--steps 60] [--transport ipc] [--out FILE]
    python benchmarks/gpu/learning.py --plot FILE                     # the figure of a result, where matplotlib is
    python benchmarks/gpu/learning.py --quick --device cpu --engine embedded       # a dry run: it shows that it works

Two parts. ``timed``: η = 0 and η = 2, decoupled, one after the other with the GPU for themselves: step times, GPU
busy share, what asynchrony gave. ``side by side``: the other runs at once on the same GPU (or spread over those there
are), for their rewards alone: they slow each other down, so their seconds mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.demo_runs import ROOT
from benchmarks.gpu.gpu_meter import GpuMeter
from benchmarks.gpu.live_runs import (
    ONE_GPU,
    Experiment,
    Report,
    engine_facts,
    engine_overrides,
    limit_time,
    run_or_fall_back,
    step_figures,
    vllm_flags,
)
from workflows.additions import Task, write

METHODS: Mapping[str, Sequence[str]] = {
    "naive PPO": ("actor.objective=ppo", "actor.prox=behave"),
    "decoupled": ("actor.objective=decoupled_ppo", "actor.prox=recompute", "actor.behave_cap=5.0"),
}
TIMED: Sequence[tuple[int, str]] = ((0, "decoupled"), (2, "decoupled"))
BESIDE: Sequence[tuple[int, str]] = ((8, "decoupled"), (8, "naive PPO"), (2, "naive PPO"), (0, "naive PPO"))
#: seconds that a run takes beside its steps: two processes that load, graphs that are captured, evaluations
_OVERHEAD = 75.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all runs share. ``kv_gb``: of one server; ``batch`` in groups; ``gpus``: of this machine."""

    device: str
    engine: str
    transport: str
    folder: Path
    model: Path
    steps: int
    batch: int
    samples: int
    learning_rate: float
    kv_gb: float
    python: str | None
    fallback: bool = False
    extra: tuple[str, ...] = ()

    def overrides(self, eta: int, method: str) -> list[str]:
        """Of the one-GPU recipe."""
        facts = engine_facts(self.device, self.python)
        found = [
            *engine_overrides(self.device, facts, engine=self.engine),
            f"weights.transport={'shm' if self.fallback else self.transport}",
            f"model.path={self.model}",
            f"train_dataset.path={self.folder}/data/train.jsonl",
            f"valid_dataset.path={self.folder}/data/valid.jsonl",
            f"train_dataset.batch_size={self.batch}",
            f"gconfig.n_samples={self.samples}",
            f"total_train_steps={self.steps}",
            f"actor.optimizer.lr={self.learning_rate}",
            f"rollout.max_head_offpolicyness={eta}",
            f"rollout.max_concurrent_rollouts={(eta + 1) * self.batch}",
            f"evaluator.freq_steps={max(1, self.steps // 6)}",
            "saver.at_end=false",
            "rollout.start_timeout=180",
            *METHODS[method],
        ]
        if self.device != "cpu" and self.engine == "vllm":
            kv = round(self.kv_gb * 1e9)
            found.append(vllm_flags(eager=self.fallback, gpu_memory_utilization=0.1, kv_cache_memory_bytes=kv))
        return [*found, *self.extra]

    def experiment(self, eta: int, method: str, *, timeout: float, gpu: str | None = None) -> Experiment:
        return Experiment(
            config=ONE_GPU,
            overrides=self.overrides(eta, method),
            trial=name_of(eta, method).replace(" ", "-").replace("=", ""),
            runs=self.folder / "runs",
            gpu=gpu,
            timeout=timeout,
        )


def name_of(eta: int, method: str) -> str:
    return f"eta={eta} {method}"


def run_named(name: str) -> tuple[int, str]:
    """(η, method) of ``eta=2 decoupled``.

    Raises:
        SystemExit: another name.
    """
    eta, _, method = name.removeprefix("eta=").partition(" ")
    if not (name.startswith("eta=") and eta.isdigit() and method in METHODS):
        raise SystemExit(f"--beside {name!r}: write 'eta=N METHOD', METHOD one of {', '.join(METHODS)}")
    return int(eta), method


def timed_runs(report: Report, setting: Setting, gpus: GpuMeter, gpu: str | None) -> dict[str, Any]:
    """η = 0 and η = 2, each alone; what is told is reported run by run."""
    found: dict[str, Any] = {}
    for eta, method in TIMED:
        run = run_or_fall_back(
            lambda back, e=eta, m=method: replace(setting, fallback=back).experiment(  # type: ignore[misc]
                e, m, timeout=max(report.left, 1.0), gpu=gpu
            )
        )
        found[name_of(eta, method)] = step_figures(run, gpus)
        report.put("timed", found)
    return found


def runs_beside(
    setting: Setting, wanted: Sequence[tuple[int, str]], gpus: GpuMeter, *, places: Sequence[str | None], time: float
) -> dict[str, Any]:
    """All of ``wanted`` at once, on ``places`` in turn. One that fails is told and does not end the others."""

    def one(run: tuple[int, str], gpu: str | None) -> dict[str, Any]:
        try:
            return step_figures(
                run_or_fall_back(lambda back: replace(setting, fallback=back).experiment(*run, timeout=time, gpu=gpu)),
                gpus,
            )
        except RuntimeError as error:
            return {"failed": str(error)[-3000:]}

    with ThreadPoolExecutor(max_workers=len(wanted)) as pool:
        found = list(pool.map(one, wanted, itertools.cycle(places)))
    return {name_of(*run): figures for run, figures in zip(wanted, found, strict=False)}


def comparison(timed: Mapping[str, Any]) -> dict[str, Any]:
    """What η = 2 gave over η = 0 with one GPU for both pools."""
    sync, asynchronous = (timed[name_of(*run)] for run in TIMED)
    return {
        "step_time_ratio": round(sync["seconds_per_step"] / asynchronous["seconds_per_step"], 3),
        "gpu_busy": {"eta=0": sync["gpu_busy"], "eta=2": asynchronous["gpu_busy"]},
        "trainer_waiting_share": {
            "eta=0": sync["trainer_waiting_share"],
            "eta=2": asynchronous["trainer_waiting_share"],
        },
        "note": "one GPU computes for one pool at a time or for both more slowly: asynchrony fills its idle moments "
        "(requests under way, weights handed over, batches cut), and cannot give a second GPU's work",
    }


def labelled_runs(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Runs that made steps, by the label of their curve: with the learning rate where the runs differ in it.

    The rate is the part's own (``parts``: facts of each, where a file holds parts of several calls), else the file's.
    """
    facts = result.get("parts", {})
    runs = {
        (name, facts.get(part, result).get("learning_rate")): run
        for part in ("timed", "side by side")
        if isinstance(result.get(part), dict)
        for name, run in result[part].items()
        if isinstance(run, dict) and "reward" in run
    }
    several = len({rate for _, rate in runs}) > 1
    return {f"{name}, lr {rate}" if several else name: runs[name, rate] for name, rate in sorted(runs, key=str)}


def plot(result: Mapping[str, Any], out: Path) -> str:
    """Training reward (mean of 5 steps) and held-out reward by step, one colour a run."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    for name, run in labelled_runs(result).items():
        smooth = [fmean(run["reward"][max(0, i - 4) : i + 1]) for i in range(len(run["reward"]))]
        (line,) = left.plot(range(1, len(smooth) + 1), smooth, label=name.replace("eta", "η"))
        held_out = [(version, reward) for version, reward, _ in run["held_out"] if reward is not None]
        if held_out:
            right.plot(*zip(*held_out, strict=True), marker="o", color=line.get_color(), label=line.get_label())
    left.set(title="training reward, mean of 5 steps", xlabel="step", ylabel="exact sums")
    right.set(title="held-out sums", xlabel="version")
    left.legend(fontsize="small", labelspacing=0.3)  # clear of the curves
    figure.tight_layout()
    figure.savefig(out, dpi=120)
    return out.name


def gpu_places(device: str, given: int | None) -> list[str | None]:
    """Values of CUDA_VISIBLE_DEVICES that runs are spread over."""
    if device == "cpu":
        return [None]
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if given is None and not named:
        from launcher.devices import this_machine

        given = max(1, this_machine().gpus)
    return [*(named or map(str, range(given or 1)))][:given]


def measure(given: argparse.Namespace) -> Report:
    facts = {"steps": given.steps, "learning_rate": given.lr, "device": given.device}
    report = Report(given.out, "learning", budget=given.seconds, **facts)
    places = gpu_places(given.device, given.gpus)
    with tempfile.TemporaryDirectory() as name, GpuMeter() as gpus:
        setting = Setting(
            device=given.device, engine=given.engine, transport=given.transport, folder=Path(name),
            model=given.smollm2, steps=given.steps, batch=given.batch, samples=given.samples, learning_rate=given.lr,
            kv_gb=16.0, python=given.python, extra=tuple(given.overrides),
        )  # fmt: skip
        lowest, highest = given.numbers
        pairs = (highest - lowest + 1) ** 2 - 8  # less what is shown solved
        valid = 4 if given.quick else min(256, pairs // 4)
        task = Task(lowest=lowest, highest=highest, valid=valid, train=min(4096, pairs - valid))
        write(setting.folder / "data", task)
        if "timed" in given.parts:
            timed = report.part("timed", lambda: timed_runs(report, setting, gpus, places[0]))
            if timed is not None and len(timed) == len(TIMED):
                report.part("asynchrony", lambda: comparison(timed))
        if "side by side" in given.parts:
            wanted = BESIDE[:1] if given.quick else [run_named(name) for name in given.beside] or BESIDE
            smaller = replace(setting, kv_gb=6.0)
            report.part(
                "side by side",
                lambda: runs_beside(smaller, wanted, gpus, places=places, time=max(report.left, 1.0)),
                needs=0.0 if given.quick else _OVERHEAD,
            )
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["timed", "side by side"], choices=["timed", "side by side"])
    parser.add_argument(
        "--beside", nargs="+", default=[], metavar="RUN", help="runs side by side: 'eta=2 decoupled' ..."
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32, help="groups a step")
    parser.add_argument("--samples", type=int, default=8, help="siblings a group")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--numbers", type=int, nargs=2, default=(1, 12), metavar=("LOWEST", "HIGHEST"))
    parser.add_argument("--transport", default="ipc", help="ipc, shm or disk")
    parser.add_argument("--engine", choices=["vllm", "embedded"], default="vllm")
    parser.add_argument("--smollm2", type=Path, default=ROOT / "models" / "smollm2", help="python -m launcher.smollm2")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", type=int, help="spread runs side by side over so many; default: all")
    parser.add_argument("--python", help="vLLM's interpreter; default: this one, on a CPU .venv-vllm's")
    parser.add_argument("--seconds", type=float, default=480.0, help="for everything; what runs then is cut")
    parser.add_argument("--quick", action="store_true", help="two steps of a few rows")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, metavar="RESULT", help="draw a result's figure beside it, and end")
    parser.add_argument("overrides", nargs="*", help="key=value, for every run")
    given = parser.parse_args()
    if given.plot is not None:
        plot(json.loads(given.plot.read_text()), given.plot.with_suffix(".png"))
        return 0
    if given.quick:
        given.steps, given.batch, given.samples = 2, 4, 2
    if given.device == "cpu":
        given.transport = "shm"
    limit_time(given.seconds + 30.0)
    report = measure(given)
    if given.out is not None:
        report.part("figure", lambda: plot(report.found, given.out.with_suffix(".png")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
