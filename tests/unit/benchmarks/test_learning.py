"""Learning over seeds: who runs where, and what several runs of one kind say together."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3]))

from areal_like.config.load import load_config
from benchmarks.demo_runs import ROOT
from benchmarks.gpu import learning
from benchmarks.gpu.gpu_meter import GpuMeter
from benchmarks.gpu.learning_seeds import Mean, over_seeds, tables
from benchmarks.gpu.live_runs import ONE_GPU, LiveRun


def run(reward: list[float], held_out: list[tuple[int, float | None]] = (), **more: Any) -> dict[str, Any]:  # type: ignore[assignment]
    return {"reward": reward, "held_out": [[version, value, 1.0] for version, value in held_out], **more}


def beside(*runs: tuple[str, Any], **facts: Any) -> dict[str, Any]:
    return {"learning_rate": 1e-5, **facts, "side by side": dict(runs)}


def test_means_and_errors_over_seeds_by_hand() -> None:
    # rewards of steps 11 to 20 and of the last ten of 30; and of a run that was cut after 15 steps
    whole = [
        run([0.0] * 10 + [early] * 10 + [last] * 10, [(0, 0.1), (10, value), (30, 0.5)])
        for early, last, value in ((0.2, 0.7, 0.3), (0.4, 0.8, 0.6), (0.6, 0.9, 0.9))
    ]
    cut = run([0.0] * 10 + [1.0] * 5, [(0, 0.1), (10, None)], failed="cut")
    named = zip(("1", "2", "3", "4"), [*whole, cut], strict=True)
    (group,) = over_seeds(beside(*((f"eta=2 naive PPO, seed {seed}", told) for seed, told in named)))
    assert (group.eta, group.method, group.learning_rate, group.seeds) == (2, "naive PPO", 1e-5, (1, 2, 3, 4))
    assert group.early == Mean(by_seed={1: pytest.approx(0.2), 2: pytest.approx(0.4), 3: pytest.approx(0.6)})
    assert group.last == Mean(by_seed={1: pytest.approx(0.7), 2: pytest.approx(0.8), 3: pytest.approx(0.9)})
    assert group.early.mean == pytest.approx(0.4)
    assert group.early.error == pytest.approx(0.2 / 3**0.5)  # deviation of 0.2, 0.4, 0.6 with n - 1: 0.2
    held_out = group.held_out
    assert list(held_out) == [0, 10, 30]
    assert held_out[0].by_seed == {1: 0.1, 2: 0.1, 3: 0.1, 4: 0.1}
    assert (held_out[10].mean, held_out[10].error) == (pytest.approx(0.6), pytest.approx(0.3 / 3**0.5))
    assert list(held_out[10].by_seed) == [1, 2, 3]  # the fourth's evaluation told nothing


def test_a_single_seed_has_no_error_and_short_runs_have_no_ends() -> None:
    (group,) = over_seeds(beside(("eta=0 decoupled", run([0.5] * 9, [(0, 0.25), (9, 0.5), (9, 0.75)]))))
    assert (group.early, group.last) == (None, None)
    assert (group.held_out[9].mean, group.held_out[9].error) == (0.75, None)  # the last evaluation counts


@pytest.mark.parametrize(
    ("name", "more", "seed"),
    [
        ("eta=8 decoupled", {}, 1),
        ("eta=8 decoupled", {"seed": 5}, 5),
        ("eta=8 decoupled, seed 7", {"seed": 7}, 7),
        ("eta=8 decoupled, seed 7", {}, 7),
    ],
)
def test_a_run_s_seed_is_in_its_name_or_its_figures_or_one(name: str, more: dict[str, int], seed: int) -> None:
    (group,) = over_seeds(beside((name, run([0.5], **more))))
    assert (group.eta, group.method, group.seeds) == (8, "decoupled", (seed,))


def test_the_rate_is_the_run_s_or_its_part_s_or_the_file_s() -> None:
    """Only runs of one rate are averaged."""
    named = {"eta=0 decoupled": run([0.5])}
    result = {"learning_rate": 1e-5, "timed": named, "side by side": named}
    assert [(g.learning_rate, g.replaced) for g in over_seeds(result)] == [(1e-5, 1)]
    parts = {"timed": {"learning_rate": 2e-5}, "side by side": {"learning_rate": 1e-5}}
    assert [g.learning_rate for g in over_seeds({**result, "parts": parts})] == [2e-5, 1e-5]
    own = {"side by side": {"eta=0 decoupled": run([0.5], learning_rate=3e-5)}}
    assert [g.learning_rate for g in over_seeds({**result, **own})] == [3e-5, 1e-5]
    assert [g.learning_rate for g in over_seeds({"timed": named})] == [None]


def test_what_made_no_step_is_left_out() -> None:
    result = beside(
        ("eta=0 decoupled", {"failed": "x"}), ("eta=2 decoupled", "not run: 3 s were left"), timed="not run"
    )
    assert over_seeds(result) == []
    assert over_seeds({"side by side": "not run", "timed": None}) == []


def test_several_files_are_one_table_and_a_later_run_replaces_one_of_its_seed() -> None:
    old = beside(("eta=2 decoupled", run([0.5] * 10, [(0, 0.1)])), ("eta=2 naive PPO", run([0.25] * 10, [(0, 0.2)])))
    new = beside(
        ("eta=2 decoupled, seed 2", run([0.7] * 10, [(0, 0.3)])),
        ("eta=2 naive PPO, seed 1", run([0.35] * 10, [(0, 0.4)])),
        ("eta=2 naive PPO, seed 2", run([0.45] * 10, [(0, 0.5), (5, 0.75)])),
    )
    text = tables(over_seeds(old, new)).splitlines()
    # last ten, decoupled: 0.5 and 0.7, a deviation of √0.02 and an error of √0.01; naive: 0.35 and 0.45
    head = "held-out 0 | held-out 5 | training, steps 11 to 20 | last ten |"
    assert f"| η | objective | lr | seeds | {head}" in text
    assert "| 2 | decoupled | 1e-05 | 1, 2 | .200 ± .100 |  |  | .600 ± .100 |" in text
    assert "| 2 | naive PPO | 1e-05 | 1, 2 | .450 ± .050 | .750 (1) |  | .400 ± .050 |" in text
    assert f"| η | objective | lr | seed | {head}" in text
    assert "| 2 | decoupled | 1e-05 | 2 | .300 |  |  | .700 |" in text
    assert "| 2 | naive PPO | 1e-05 | 1 | .400 |  |  | .350 |" in text
    # seed by seed .5 - .35 and .7 - .45: a mean of .2, a deviation of √.005
    assert "| 2 | decoupled less naive PPO | 1e-05 | 1, 2 | -.250 ± .050 |  |  | .200 ± .050 |" in text
    assert text[-1].endswith("eta=2 naive PPO, lr 1e-05: 1.")


def test_methods_are_compared_at_their_own_lag_and_rate_alone() -> None:
    rows = ("eta=2 decoupled, seed 1", run([0.5])), ("eta=8 naive PPO, seed 1", run([0.5]))
    other = ("eta=2 naive PPO, seed 2", run([0.5])), ("eta=8 decoupled, seed 1", run([0.5], learning_rate=2e-5))
    assert "less" not in tables(over_seeds(beside(*rows, *other)))


def test_published_results_from_before_there_were_seeds_are_seed_one() -> None:
    (result,) = learning.read_results([ROOT / "benchmarks" / "results" / "learning_h200.json"])
    groups = {(g.eta, g.method, g.learning_rate): g for g in over_seeds(result)}
    first = groups[2, "naive PPO", 1e-5]
    assert first.early is not None
    assert (first.held_out[10].by_seed[1], first.early.by_seed[1]) == (
        pytest.approx(0.596, abs=5e-4),
        pytest.approx(0.716, abs=5e-4),
    )


def test_training_rewards_are_smoothed_seed_by_seed() -> None:
    (group,) = over_seeds(beside(("eta=0 decoupled", run([0.0, 1.0, 0.5])), ("eta=0 decoupled, seed 2", run([1.0]))))
    smooth = group.smoothed(2)
    assert {step: dict(mean.by_seed) for step, mean in smooth.items()} == {
        1: {1: 0.0, 2: 1.0},
        2: {1: 0.5},
        3: {1: 0.75},
    }


def test_curves_tell_their_rate_where_it_differs_and_how_many_seeds_they_are() -> None:
    told = run([0.1])
    timed, others = {"eta=0 decoupled": told}, {"eta=0 naive PPO, seed 1": told, "eta=0 naive PPO, seed 2": told}
    result = {"learning_rate": 1e-5, "timed": timed, "side by side": others}
    assert list(learning.labelled(over_seeds(result))) == ["η=0 decoupled", "η=0 naive PPO, 2 seeds"]
    parts = {"timed": {"learning_rate": 2e-5}, "side by side": {"learning_rate": 1e-5}}
    labels = ["η=0 decoupled, lr 2e-05", "η=0 naive PPO, lr 1e-05, 2 seeds"]
    assert list(learning.labelled(over_seeds({**result, "parts": parts}))) == labels


def test_a_figure_is_drawn_of_whatever_runs_there_are(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = {
        "timed": {"eta=0 decoupled": run([0.1] * 6, [(0, 0.1), (6, None)], learning_rate=2e-5)},
        "side by side": {
            "eta=8 naive PPO": {"failed": "x"},
            "eta=0 decoupled, seed 1": run([0.2] * 6, [(0, 0.1), (6, 0.3)]),
            "eta=0 decoupled, seed 2": run([0.4] * 3, [(0, 0.2)]),
        },
    }
    learning.plot(result, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_a_curve_is_the_mean_in_a_band_from_lowest_to_highest() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure, (several, single) = pyplot.subplots(1, 2)
    figures = {0: Mean(by_seed={1: 0.0, 2: 0.5, 3: 1.0}), 10: Mean(by_seed={1: 0.25, 2: 0.75})}
    learning._curve(several, figures, {"color": "C0"})
    learning._curve(single, {0: Mean(by_seed={1: 0.5})}, {"color": "C0"})
    assert [list(map(float, xy)) for xy in several.lines[0].get_xydata()] == [[0.0, 0.5], [10.0, 0.5]]
    corners = {tuple(map(float, xy)) for xy in several.collections[0].get_paths()[0].vertices}
    assert corners == {(0.0, 0.0), (0.0, 1.0), (10.0, 0.25), (10.0, 0.75)}
    assert (len(single.lines), len(single.collections)) == (1, 0)
    pyplot.close(figure)


# -- who runs where --


@pytest.fixture
def setting(tmp_path: Path) -> learning.Setting:
    return learning.Setting(
        device="cpu", engine="embedded", transport="shm", folder=tmp_path, model=tmp_path / "model", steps=6, batch=4,
        samples=2, learning_rate=1e-5, kv_gb=1.0, python="no/such/python", seed=1,
    )  # fmt: skip


def test_the_seed_is_the_whole_run_s(setting: learning.Setting) -> None:
    for seed in (1, 7):
        experiment = replace(setting, seed=seed).experiment(2, "naive PPO", timeout=1.0)
        assert load_config(ROOT / ONE_GPU, experiment.overrides).seed == seed
        assert experiment.trial == f"eta-2-naive-PPO-seed-{seed}"


def running(
    monkeypatch: pytest.MonkeyPatch, ends: Callable[[learning.Experiment], None]
) -> list[tuple[str, str | None]]:
    """Experiments make one step at once; who began where."""
    begun: list[tuple[str, str | None]] = []

    def at_once(make: Callable[[bool], learning.Experiment]) -> LiveRun:
        experiment = make(False)
        begun.append((experiment.trial, experiment.gpu))
        ends(experiment)
        step = {
            "seconds": 1.0, "step_seconds": 1.0, "wait_seconds": 0.0, "update_seconds": 1.0, "publish_seconds": 0.0,
            "pause_seconds": 0.0, "reward": 0.5, "rollout": {"generated_tokens": 0},
        }  # fmt: skip
        return LiveRun(steps=[step], times=[1.0], evaluations=[], summary={}, wall_seconds=1.0)

    monkeypatch.setattr(learning, "run_or_fall_back", at_once)
    return begun


def test_every_run_once_a_seed_and_each_place_gets_its_share_of_every_run(
    setting: learning.Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(8, timeout=10)
    begun = running(monkeypatch, lambda experiment: together.wait() and None)
    wanted = [(8, "decoupled"), (8, "naive PPO"), (2, "decoupled"), (2, "naive PPO")]
    work = learning.Beside(wanted=wanted, seeds=[1, 2], places=["4", "5"], most=None, left=lambda: 100.0)
    told: list[list[str]] = []
    found = learning.runs_beside(setting, work, GpuMeter(), lambda found: told.append(list(found)))
    assert list(found) == [f"eta={eta} {method}, seed {seed}" for eta, method in wanted for seed in (1, 2)]
    assert all(figures["reward"] == [0.5] and "by_step" not in figures for figures in found.values())
    assert [figures["seed"] for figures in found.values()] == [1, 2] * 4
    places = {gpu: sorted(trial[:-1] for trial, place in begun if place == gpu) for gpu in ("4", "5")}
    assert len(places["4"]) == 4 and places["4"] == places["5"]  # one of each run
    assert told[-1] == list(found)


def test_one_seed_is_named_as_ever_and_told(setting: learning.Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    running(monkeypatch, lambda experiment: None)
    work = learning.Beside(wanted=[(2, "decoupled")], seeds=[3], places=[None], most=None, left=lambda: 100.0)
    found = learning.runs_beside(setting, work, GpuMeter())
    assert {name: figures["seed"] for name, figures in found.items()} == {"eta=2 decoupled": 3}


def test_a_run_that_fails_and_one_that_has_no_time_left_are_told(
    setting: learning.Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [100.0]

    def end(experiment: learning.Experiment) -> None:
        if "decoupled" in experiment.trial:
            raise RuntimeError("no step")
        left[0] = 10.0

    begun = running(monkeypatch, end)
    wanted = [(8, "decoupled"), (2, "naive PPO"), (0, "naive PPO")]
    work = learning.Beside(wanted=wanted, seeds=[1], places=[None], most=1, left=lambda: left[0])
    found = learning.runs_beside(setting, work, GpuMeter())
    assert "no step" in found["eta=8 decoupled"]["failed"]
    assert found["eta=2 naive PPO"]["reward"] == [0.5]
    assert found["eta=0 naive PPO"].startswith("not run: 10 s")
    assert [trial for trial, _ in begun] == ["eta-8-decoupled-seed-1", "eta-2-naive-PPO-seed-1"]
