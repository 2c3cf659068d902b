"""Learning with a real model on one GPU: SmolLM2-135M-Instruct, sums, GRPO; η in {0, 2, 8}, naive PPO and decoupled.

    python benchmarks/gpu/learning.py [--seconds 480] [--steps 60] [--transport ipc] [--out FILE]
    python benchmarks/gpu/learning.py --parts "side by side" --seeds 1 2 3 --gpus 4 [--most 6]
    python benchmarks/gpu/learning.py --plot FILE                     # the figure of a result, where matplotlib is
    python benchmarks/gpu/learning.py --table FILE [FILE ...]         # Markdown: over seeds, and seed by seed
    python benchmarks/gpu/learning.py --quick --device cpu --engine embedded       # a dry run: it shows that it works

Two parts. ``timed``: η = 0 and η = 2, decoupled, one after the other with the GPU for themselves: step times, GPU
busy share, what asynchrony gave. ``side by side``: the other runs at once on the same GPU (or spread over those there
are), once a seed, for their rewards alone: they slow each other down, so their seconds mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.demo_runs import ROOT
from benchmarks.gpu.gpu_meter import GpuMeter
from benchmarks.gpu.learning_seeds import Mean, OverSeeds, name_of, over_seeds, tables
from benchmarks.gpu.live_runs import (
    ONE_GPU,
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
from benchmarks.gpu.refusals import check_limits, check_model
from benchmarks.gpu.run_figures import step_figures
from benchmarks.gpu.spread import spread
from workflows.additions import Task, write

METHODS: Mapping[str, Sequence[str]] = {
    "naive PPO": ("actor.objective=ppo", "actor.prox=behave"),
    "decoupled": ("actor.objective=decoupled_ppo", "actor.prox=recompute", "actor.behave_cap=5.0"),
}
TIMED: Sequence[tuple[int, str]] = ((0, "decoupled"), (2, "decoupled"))
BESIDE: Sequence[tuple[int, str]] = ((8, "decoupled"), (8, "naive PPO"), (2, "naive PPO"), (0, "naive PPO"))
#: seconds that a run takes beside its steps: two processes that load, graphs that are captured, evaluations
_OVERHEAD = 75.0
NOT_DRAWN = "no figure: matplotlib is not installed (pip install -e .[bench])"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all runs share but η, method and, side by side, the seed. ``kv_gb``: of one server; ``batch`` in groups."""

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
    seed: int
    fallback: bool = False
    extra: tuple[str, ...] = ()

    def overrides(self, eta: int, method: str) -> list[str]:
        """Of the one-GPU recipe."""
        facts = engine_facts(self.device, self.python, engine=self.engine)
        found = [
            *engine_overrides(self.device, facts, engine=self.engine),
            f"weights.transport={'shm' if self.fallback else self.transport}",
            f"seed={self.seed}",
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
            trial=re.sub(r"\W+", "-", name_of(eta, method, self.seed)),
            runs=self.folder / "runs",
            gpu=gpu,
            timeout=timeout,
        )


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
        found[name_of(eta, method)] = {"seed": setting.seed, **step_figures(run, gpus)}
        report.put("timed", found)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What runs side by side: ``wanted`` (η, method) once with each of ``seeds``, at most ``most`` at once in a place.

    ``left``: the seconds that remain, asked when a run begins; it is left out where those are fewer than ``needs``.
    """

    wanted: Sequence[tuple[int, str]]
    seeds: Sequence[int]
    places: Sequence[str | None]
    most: int | None
    left: Callable[[], float]
    needs: float = _OVERHEAD

    def name(self, run: tuple[int, str, int]) -> str:
        eta, method, seed = run
        return name_of(eta, method, seed if len(self.seeds) > 1 else None)


def runs_beside(
    setting: Setting, beside: Beside, gpus: GpuMeter, told: Callable[[dict[str, Any]], None] = lambda found: None
) -> dict[str, Any]:
    """The figures of each by name. One that fails is told and does not end the others; ``told``: what there is so far.

    Figures step by step are left out: seconds are all that they would add.
    """

    def one(run: tuple[int, str, int], gpu: str | None) -> dict[str, Any] | str:
        eta, method, seed = run
        if beside.left() < beside.needs:
            return f"not run: {max(beside.left(), 0.0):.0f} s were left when its turn came"

        def experiment(back: bool) -> Experiment:
            mine = replace(setting, fallback=back, seed=seed)
            return mine.experiment(eta, method, timeout=max(beside.left(), 1.0), gpu=gpu)

        try:
            found = step_figures(run_or_fall_back(experiment), gpus)
        except Exception as error:  # one run must not cost the others
            return {"seed": seed, "failed": f"{type(error).__name__}: {error}"[-3000:]}
        return {"seed": seed, **{name: figure for name, figure in found.items() if name != "by_step"}}

    def named(found: Mapping[tuple[int, str, int], Any]) -> dict[str, Any]:
        return {beside.name(run): figures for run, figures in found.items()}

    # the seeds of a run follow each other, so that each place gets its share of every run
    runs = [(eta, method, seed) for eta, method in beside.wanted for seed in beside.seeds]
    return named(spread(runs, beside.places, one, most=beside.most, told=lambda found: told(named(found))))


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


def labelled(groups: Sequence[OverSeeds]) -> dict[str, OverSeeds]:
    """By the label of their curve: with the learning rate where they differ in it, and how many seeds, if several."""
    rates = {group.learning_rate for group in groups}
    found = {}
    for group in groups:
        rate = f", lr {group.learning_rate}" if len(rates) > 1 else ""
        seeds = f", {len(group.seeds)} seeds" if len(group.seeds) > 1 else ""
        found[name_of(group.eta, group.method).replace("eta", "η") + rate + seeds] = group
    return found


def plot(result: Mapping[str, Any], out: Path) -> str:
    """Training reward (mean of 5 steps) and held-out reward by step: means over seeds, in bands from lowest to highest.

    One colour for an η and method, and one dash for a learning rate. Returns the figure's name, or why there is none.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        return NOT_DRAWN
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    groups = over_seeds(result)
    methods = sorted({(group.eta, group.method) for group in groups})
    runs = Counter(group.learning_rate for group in groups for _ in group.seeds)
    rates = [rate for rate, _ in runs.most_common()]  # the rate of most runs has lines without gaps
    for label, group in labelled(groups).items():
        colour = f"C{methods.index((group.eta, group.method))}"
        dash = ("-", "--", "-.", ":")[rates.index(group.learning_rate) % 4]
        look = {"color": colour, "linestyle": dash, "label": label}
        _curve(left, group.smoothed(5), look)
        _curve(right, group.held_out, {**look, "marker": "o"})
    left.set(title="training reward, mean of 5 steps", xlabel="step", ylabel="exact sums")
    right.set(title="held-out sums", xlabel="version")
    left.legend(fontsize="small", labelspacing=0.3)  # clear of the curves
    figure.tight_layout()
    figure.savefig(out, dpi=120)
    return out.name


def _curve(axes: Any, figures: Mapping[int, Mean], look: Mapping[str, Any]) -> None:
    """Means by step, and, where a step has several seeds, the band from the lowest to the highest."""
    axes.plot(list(figures), [figure.mean for figure in figures.values()], **look)
    seeds = [figure.by_seed.values() for figure in figures.values()]
    if any(len(values) > 1 for values in seeds):
        axes.fill_between(
            list(figures), list(map(min, seeds)), list(map(max, seeds)), color=look["color"], alpha=0.15, linewidth=0
        )


def gpu_places(device: str, given: int | None) -> list[str | None]:
    """Values of CUDA_VISIBLE_DEVICES that runs are spread over."""
    if device == "cpu":
        return [None]
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if given is None and not named:
        from launcher.devices import this_machine

        given = max(1, this_machine().gpus)
    return [*(named or map(str, range(given or 1)))][:given]


def read_results(paths: Sequence[Path]) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def measure(given: argparse.Namespace) -> Report:
    facts = {"steps": given.steps, "learning_rate": given.lr, "seeds": given.seeds, "device": given.device}
    report = Report(given.out, "learning", budget=given.seconds, **facts)
    places = gpu_places(given.device, given.gpus)
    with tempfile.TemporaryDirectory() as name, GpuMeter() as gpus:
        setting = Setting(
            device=given.device, engine=given.engine, transport=given.transport, folder=Path(name),
            model=given.smollm2, steps=given.steps, batch=given.batch, samples=given.samples, learning_rate=given.lr,
            kv_gb=16.0, python=given.python, seed=given.seeds[0], extra=tuple(given.overrides),
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
            beside = Beside(
                wanted=[run_named(name) for name in given.beside] or BESIDE[: 1 if given.quick else None],
                seeds=given.seeds, places=places, most=given.most, left=lambda: report.left,
                needs=0.0 if given.quick else _OVERHEAD,
            )  # fmt: skip
            smaller = replace(setting, kv_gb=6.0)
            report.part(
                "side by side",
                lambda: runs_beside(smaller, beside, gpus, lambda found: report.put_quietly("side by side", found)),
                needs=beside.needs,
            )
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["timed", "side by side"], choices=["timed", "side by side"])
    parser.add_argument(
        "--beside", nargs="+", default=[], metavar="RUN", help="runs side by side: 'eta=2 decoupled' ..."
    )
    add_seeds(parser, "of the runs side by side, each once a seed; the timed ones take the first")
    parser.add_argument("--most", type=int, help="runs at once on a GPU, side by side; default: all")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32, help="groups a step")
    parser.add_argument("--samples", type=int, default=8, help="siblings a group")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--numbers", type=int, nargs=2, default=(1, 12), metavar=("LOWEST", "HIGHEST"))
    parser.add_argument("--transport", default="ipc", choices=["ipc", "shm", "disk"])
    parser.add_argument("--engine", choices=["vllm", "embedded"], default="vllm")
    parser.add_argument("--smollm2", type=Path, default=ROOT / "models" / "smollm2", help="python -m launcher.smollm2")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", type=int, help="spread runs side by side over so many; default: all")
    parser.add_argument("--python", help="vLLM's interpreter; default: this one, on a CPU .venv-vllm's")
    parser.add_argument("--seconds", type=float, default=480.0, help="for everything; what runs then is cut")
    parser.add_argument("--quick", action="store_true", help="two steps of a few rows")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, metavar="RESULT", help="draw a result's figure beside it, and end")
    parser.add_argument("--table", type=Path, nargs="+", metavar="RESULT", help="print Markdown of results, and end")
    parser.add_argument("overrides", nargs="*", help="key=value, for every run")
    given = parser.parse_args()
    check_seeds(parser, given)
    if given.most is not None and given.most < 1:
        parser.error(f"--most {given.most}: at least one run at once")
    if given.table is not None:
        print(tables(over_seeds(*read_results(given.table))))
        return 0
    if given.plot is not None:
        print(said := plot(read_results([given.plot])[0], given.plot.with_suffix(".png")))
        return 1 if said == NOT_DRAWN else 0
    check_limits(parser, given)
    check_machine(parser, given, [given.engine], instead="--engine embedded")
    check_model(parser, given.smollm2)
    if given.quick:
        given.steps, given.batch, given.samples = 2, 4, 2
    if given.device == "cpu":
        given.transport = "shm"
    limit_time(given.seconds + 30.0)
    report = measure(given)
    if given.out is not None:
        report.part("figure", lambda: plot(report.found, given.out.with_suffix(".png")))
    return report.status


if __name__ == "__main__":
    sys.exit(main())
