"""What staleness costs, and what each correction gives back: final accuracy and area under the curve by η and method.

    python benchmarks/staleness_ablation.py [--out FILE]             # the whole table, about 20 min on one core
    python benchmarks/staleness_ablation.py --tasks guess --etas 0 8 --seeds 1 --steps 20 --out /tmp/ablation

The paper's ablation in miniature (AReaL, Fu et al. 2025, table 2). Staleness is simulated in one process: the batch of
step t is written by the weights of version max(0, t − η), so that every token has lag η once the run is warm, the most
that the bound allows. Prompts, workflow, reward, objective and optimiser are the experiment file's own, by way of
``sync_baseline.py``. Accuracy is that of the policy being trained, sampled at temperature 1 on held-out prompts; the
area under the curve is its mean over evenly spaced evaluations, the first step included.

Prints the table; ``--out`` also writes FILE.json and FILE.png (the picture needs matplotlib: ``pip install -e
.[bench]``).
"""

import argparse
import collections
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import active_children, get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from demo_runs import leave_on_signals, write_result  # noqa: E402

from launcher.child import die_with_parent  # noqa: E402

#: method -> the overrides that make it
METHODS: Mapping[str, tuple[str, ...]] = {
    "no correction": ("actor.objective=decoupled_ppo", "actor.prox=recompute", "actor.behave_mode=ignore"),
    "naive PPO": ("actor.objective=ppo", "actor.prox=behave"),
    "decoupled": ("actor.objective=decoupled_ppo", "actor.prox=recompute", "actor.behave_cap=null"),
    "decoupled, truncated": ("actor.objective=decoupled_ppo", "actor.prox=recompute", "actor.behave_cap=5.0"),
}
#: at η = 0 prox is behave, every weight is 1 and all methods are this one
ON_POLICY = "decoupled, truncated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """An experiment file, and what differs here: a smaller model, and a learning rate that suits it at η = 0.

    Attributes:
        hidden: width of the model, half that of the experiment's.
        steps: of training; ``evaluation_prompts``: held-out prompts of one evaluation, two samples each.
    """

    name: str
    config: str
    hidden: int
    steps: int
    evaluation_prompts: int
    overrides: tuple[str, ...] = ()


TASKS = {
    "arithmetic": Task(
        name="arithmetic",
        config="configs/arithmetic_cpu.yaml",
        hidden=64,
        steps=80,
        evaluation_prompts=180,
        overrides=("actor.optimizer.lr=2e-4",),
    ),
    "guess": Task(
        name="guess",
        config="configs/guess_cpu.yaml",
        hidden=64,
        steps=80,
        evaluation_prompts=112,
        overrides=("actor.optimizer.lr=5e-4",),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One training run: where in the table it belongs."""

    task: str
    method: str
    eta: int
    seed: int
    steps: int
    evaluations: int
    models: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """``curve``: accuracy of the trained policy at evenly spaced steps, the first and the last included."""

    task: str
    method: str
    eta: int
    seed: int
    curve: tuple[float, ...]
    final: float
    area: float
    cpu_seconds: float


def run_cell(cell: Cell) -> Outcome:
    """Train one policy on data that is ``eta`` versions old. Runs in a process of its own."""
    from lockstep import Episodes

    from areal_like.config.load import load_config

    started, task = time.process_time(), TASKS[cell.task]
    folder = Path(cell.models) / f"{cell.task}-{cell.seed}"
    common = [f"model.path={folder}/model", f"seed={cell.seed}", f"total_train_steps={cell.steps}", *task.overrides]
    training = [*common, f"train_dataset.path={folder}/train.jsonl", *METHODS[cell.method]]
    held_out = [f"train_dataset.path={folder}/test.jsonl", f"train_dataset.batch_size={task.evaluation_prompts}"]
    exam = load_config(ROOT / task.config, [*common, *held_out, "gconfig.n_samples=2", "actor.ppo_n_minibatches=1"])

    stops = {round(i * cell.steps / cell.evaluations) for i in range(cell.evaluations + 1)}
    curve = []
    for policy, _ in stale_training(load_config(ROOT / task.config, training), cell.eta):
        if policy.version in stops:
            curve.append(_accuracy(Episodes(exam, policy.generate)))
    last = Episodes(exam, policy.generate)
    return Outcome(
        task=cell.task,
        method=cell.method,
        eta=cell.eta,
        seed=cell.seed,
        curve=tuple(curve),
        final=fmean([_accuracy(last) for _ in range(4)]),
        area=fmean(curve),
        cpu_seconds=time.process_time() - started,
    )


def stale_training(config: Any, eta: int) -> Iterator[tuple[Any, Sequence[Any]]]:
    """The policy at every version, and the rows that made it: those that version max(0, t − η) wrote."""
    from lockstep import Episodes
    from sync_baseline import Policy

    writer, policy = Policy(config), Policy(config)
    episodes = Episodes(config, writer.generate)
    past = collections.deque([_weights(policy)], maxlen=eta + 1)
    yield policy, ()
    for step in range(config.total_train_steps):
        writer.model.load_state_dict(past[0])
        writer.version = max(0, step - eta)
        rows = episodes.next_batch()
        policy.update(rows)
        past.append(_weights(policy))
        yield policy, rows


def _weights(policy: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}


def _accuracy(examination: Any) -> float:
    rows = examination.next_batch()
    return fmean(row.reward for row in rows)


def build_models(tasks: Sequence[str], seeds: Sequence[int], folder: Path) -> None:
    """One warm start a task and seed."""
    from launcher.tiny_models import ArithmeticSettings, GuessSettings, build_arithmetic, build_guess

    for name, seed in itertools.product(tasks, seeds):
        target, hidden = folder / f"{name}-{seed}", TASKS[name].hidden
        if name == "guess":
            build_guess(target, seed, GuessSettings(size=replace(GuessSettings().size, hidden=hidden)))
        else:
            build_arithmetic(target, seed, ArithmeticSettings(size=replace(ArithmeticSettings().size, hidden=hidden)))


def cells(given: argparse.Namespace, models: str) -> list[Cell]:
    """Every run of the table. At η = 0 the methods coincide, and one of them runs."""
    return [
        Cell(
            task=task,
            method=method,
            eta=eta,
            seed=seed,
            steps=given.steps or TASKS[task].steps,
            evaluations=given.evaluations,
            models=models,
        )
        for task, seed, eta, method in itertools.product(given.tasks, given.seeds, given.etas, METHODS)
        if eta > 0 or method == ON_POLICY
    ]


def table(outcomes: Sequence[Outcome], task: str, figure: str) -> list[list[str]]:
    """Rows η, columns methods: mean and deviation over seeds of ``final`` or ``area``."""
    rows = [["η", *METHODS]]
    for eta in sorted({o.eta for o in outcomes if o.task == task}):
        row = [str(eta)]
        for method in METHODS:
            wanted = method if eta else ON_POLICY
            found = [getattr(o, figure) for o in outcomes if (o.task, o.eta, o.method) == (task, eta, wanted)]
            spread = f" ± {stdev(found):.3f}" if len(found) > 1 else ""
            row.append(f"{fmean(found):.3f}{spread}" if found else "–")
        rows.append(row)
    return rows


def show(outcomes: Sequence[Outcome]) -> None:
    for task in dict.fromkeys(o.task for o in outcomes):
        for figure, title in (("final", "final accuracy"), ("area", "area under the curve")):
            head, *body = table(outcomes, task, figure)
            print(f"\n{task}: {title}, mean ± deviation over seeds\n")
            for row in (head, ["---"] * len(head), *body):
                print("| " + " | ".join(row) + " |")


def draw(outcomes: Sequence[Outcome], path: Path) -> bool:
    """Accuracy over η, one line a method. False where matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    tasks = list(dict.fromkeys(o.task for o in outcomes))
    figure, axes = pyplot.subplots(len(tasks), 2, figsize=(10, 4 * len(tasks)), squeeze=False)
    for task, panels in zip(tasks, axes, strict=True):
        for axis, key, title in zip(panels, ("final", "area"), ("final accuracy", "area under the curve"), strict=True):
            etas = sorted({o.eta for o in outcomes if o.task == task})
            for number, method in enumerate(METHODS):
                _line(axis, [o for o in outcomes if o.task == task], etas, method, key, f"C{number}")
            axis.set(title=f"{task}: {title}", xlabel="η (lag of every token, in versions)", ylabel="accuracy")
            axis.set_xticks(range(len(etas)), [str(eta) for eta in etas])
            axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True


def _line(axis: Any, outcomes: Sequence[Outcome], etas: Sequence[int], method: str, key: str, colour: str) -> None:
    """The mean over seeds, and a dot for each of them."""
    means = []
    for place, eta in enumerate(etas):
        wanted = method if eta else ON_POLICY
        found = [getattr(o, key) for o in outcomes if (o.eta, o.method) == (eta, wanted)]
        means.append(fmean(found))
        axis.plot([place] * len(found), found, ".", color=colour, alpha=0.4)
    axis.plot(range(len(etas)), means, "-o", color=colour, label=method, markersize=4)


def save(outcomes: Sequence[Outcome], given: argparse.Namespace, *, seconds: float) -> None:
    tasks = list(dict.fromkeys(o.task for o in outcomes))
    result = {
        "tasks": {name: {**asdict(TASKS[name]), "steps": given.steps or TASKS[name].steps} for name in tasks},
        "methods": {name: list(overrides) for name, overrides in METHODS.items()},
        "wall_seconds": round(seconds, 1),
        "tables": {name: {figure: table(outcomes, name, figure) for figure in ("final", "area")} for name in tasks},
        "runs": [asdict(outcome) for outcome in outcomes],
    }
    write_result(given.out.with_suffix(".json"), result)


def run_cells(planned: Sequence[Cell], jobs: int) -> Iterator[Outcome]:
    """In processes that end with this one."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=die_with_parent) as pool:
        try:
            yield from pool.map(run_cell, planned)
        except BaseException:
            for process in active_children():  # else leaving waits for what they do
                process.terminate()
            raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--etas", nargs="+", type=int, default=[0, 1, 2, 4, 8, 16])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="training steps of every run; default: the task's own")
    parser.add_argument("--evaluations", type=int, default=8, help="after the first, evenly spaced")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, one thread each")
    parser.add_argument(
        "--out", type=Path, help="FILE.json and FILE.png are written; default: the table is only printed"
    )
    given = parser.parse_args()
    leave_on_signals()
    started, outcomes = time.monotonic(), list[Outcome]()
    with tempfile.TemporaryDirectory() as models:
        build_models(given.tasks, given.seeds, Path(models))
        planned = cells(given, models)
        for outcome in run_cells(planned, given.jobs):
            outcomes.append(outcome)
            print(
                f"{len(outcomes)}/{len(planned)}  {outcome.task}  seed {outcome.seed}  η {outcome.eta}  "
                f"{outcome.method}: {outcome.final:.3f}, area {outcome.area:.3f} "
                f"({outcome.cpu_seconds:.1f} CPU s)",
                flush=True,
            )
            if given.out is not None:
                save(outcomes, given, seconds=time.monotonic() - started)  # what there is, should it be cut short
    show(outcomes)
    if given.out is not None and not draw(outcomes, given.out.with_suffix(".png")):
        print("no picture: matplotlib is not installed (pip install -e .[bench])")
    return 0


if __name__ == "__main__":
    sys.exit(main())
