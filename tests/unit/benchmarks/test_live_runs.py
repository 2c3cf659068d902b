"""The parts of the GPU benchmarks that are no measurement: results that survive failures, clients, figures."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3]))

from areal_like.config.load import load_config
from areal_like.errors import ConfigError
from benchmarks.demo_runs import ROOT
from benchmarks.gpu import two_gpu_async
from benchmarks.gpu.child_processes import Client, process_group
from benchmarks.gpu.gpu_meter import GpuMeter
from benchmarks.gpu.live_runs import (
    ONE_GPU,
    TWO_GPUS,
    Experiment,
    LiveRun,
    Report,
    add_seeds,
    check_seeds,
    engine_facts,
    engine_overrides,
)
from benchmarks.gpu.run_figures import step_figures


def fail() -> None:
    raise ValueError("no such luck")


def test_a_part_that_fails_costs_no_other(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    report = Report(out, "some", budget=60.0, device="cpu")
    assert report.part("first", lambda: {"rate": 1.5}) == {"rate": 1.5}
    assert report.part("second", fail) is None
    assert json.loads(out.read_text())["first"] == {"rate": 1.5}  # what is there when the next one ends everything
    assert report.part("third", lambda: 3) == 3
    found = json.loads(out.read_text())
    assert "no such luck" in found["second"]["failed"]
    assert (found["benchmark"], found["device"], found["third"]) == ("some", "cpu", 3)


def test_a_part_that_would_begin_too_late_is_named(tmp_path: Path) -> None:
    report = Report(tmp_path / "found.json", "some", budget=5.0)
    assert report.part("long", fail, needs=50.0) is None
    assert report.found["long"].startswith("not run")


ECHO = """
import json, sys
print("noise", flush=True)
print("@ready", flush=True)
for line in sys.stdin:
    work = json.loads(line)
    if work == "end":
        sys.exit("why it ended")
    print("between", flush=True)
    print("@" + json.dumps({"error": "refused"} if work == "refuse" else {"doubled": 2 * work}), flush=True)
"""


def test_a_client_answers_turn_by_turn_and_tells_what_failed(tmp_path: Path) -> None:
    with Client([sys.executable, "-c", ECHO], "token", tmp_path / "log") as client:
        assert client.ask(3) == {"doubled": 6}
        with pytest.raises(RuntimeError, match="refused"):
            client.ask("refuse")
        assert client.ask(4) == {"doubled": 8}
        with pytest.raises(RuntimeError, match="why it ended"):
            client.ask("end")


def test_a_client_that_cannot_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="cannot import"),
        Client([sys.executable, "-c", "raise SystemExit('cannot import')"], "token", tmp_path / "log"),
    ):
        pass


def test_a_group_is_gone_afterwards_with_what_it_started(tmp_path: Path) -> None:
    child = f"import subprocess, sys; subprocess.run([{sys.executable!r}, '-c', 'import time; time.sleep(60)'])"
    with process_group([sys.executable, "-c", child], tmp_path / "log") as process:
        group = process.pid
    assert process.returncode is not None
    assert not any(_group_of(pid) == group for pid in Path("/proc").iterdir() if pid.name.isdigit())


def _group_of(entry: Path) -> int | None:
    """Of a process that still runs; what waits to be collected is none."""
    try:
        state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
    except (OSError, ValueError):
        return None
    return None if state == "Z" else int(group)


def run_of(step_seconds: list[float], reward: list[float]) -> LiveRun:
    """Each step generates 100 tokens; half of it is training, a quarter waiting."""
    ends = [sum(step_seconds[: i + 1]) for i in range(len(step_seconds))]
    steps: list[dict[str, Any]] = [
        {
            "step": i + 1, "seconds": end, "reward": reward[i], "step_seconds": seconds,
            "wait_seconds": seconds / 4, "update_seconds": seconds / 2, "publish_seconds": 0.1, "pause_seconds": 0.05,
            "rollout": {"generated_tokens": 100 * (i + 1)},
        }
        for i, (end, seconds) in enumerate(zip(ends, step_seconds, strict=True))
    ]  # fmt: skip
    return LiveRun(steps=steps, times=ends, evaluations=[], summary={"lag_max": 2}, wall_seconds=20.0)


def test_figures_leave_the_first_steps_out() -> None:
    found = step_figures(run_of([9.0, *[2.0] * 9], [0.0] * 8 + [0.5, 0.7]), GpuMeter())
    assert found["seconds_per_step"] == 2.0
    assert found["generated_tokens_per_second"] == 50.0
    assert (found["trainer_busy_share"], found["trainer_waiting_share"]) == (0.5, 0.25)
    assert found["reward_last"] == 0.7  # the last sixth of ten steps, rounded down: one
    assert (found["lag_max"], found["gpu_busy"]) == (2, None)


def test_figures_tell_of_the_whole_run_beside_its_steady_steps() -> None:
    found = step_figures(run_of([9.0, *[2.0] * 8, 0.5], [0.0] * 10), GpuMeter())
    assert found["whole_seconds"] == 25.5
    assert found["steady_steps"] == [4, 10]  # the first fifth of ten, and the step from which seconds are counted
    assert found["seconds_per_step"] == pytest.approx((6 * 2.0 + 0.5) / 7, abs=1e-4)  # the end is among them
    alone = step_figures(run_of([9.0], [0.0]), GpuMeter())
    assert (alone["whole_seconds"], alone["steady_steps"]) == (9.0, [1, 1])


def test_figures_tell_every_step_and_every_part_of_its_publication() -> None:
    run = run_of([9.0, 2.0, 2.0004, 2.0], [0.1] * 4)
    parts = [{"export": 4.0, "commit": 1.0}, {"export": 0.5, "commit": 0.25}, {"export": 0.125}, {"export": 0.25}]
    for step, told in zip(run.steps, parts, strict=True):
        step["publication"] = told  # type: ignore[index]
    found = step_figures(run, GpuMeter())
    assert found["by_step"] == {
        "seconds": [9.0, 11.0, 13.0, 15.0],  # rounded to milliseconds
        "step_seconds": [9.0, 2.0, 2.0, 2.0],
        "wait_seconds": [2.25, 0.5, 0.5, 0.5],
        "update_seconds": [4.5, 1.0, 1.0, 1.0],
        "publish_seconds": [0.1] * 4,
        "pause_seconds": [0.05] * 4,
        "publication": {"export": [4.0, 0.5, 0.125, 0.25], "commit": [1.0, 0.25, 0.0, 0.0]},
    }
    # of the steps behind the first two: 0.125 and 0.25; a part that a step does not have took nothing there
    assert found["publication"] == {"export": 0.1875}
    older = step_figures(run_of([1.0] * 4, [0.1] * 4), GpuMeter())  # metrics from before there were parts
    assert (older["publication"], older["by_step"]["publication"]) == ({}, {})


@pytest.mark.parametrize(
    ("seeds", "override", "complaint"),
    [
        ([2, 3, 2], "total_train_steps=2", "different numbers"),
        ([-1], "total_train_steps=2", "different numbers"),
        ([1], "seed=4", "give it as --seeds"),
    ],
)
def test_a_seed_names_one_result(
    seeds: list[int], override: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        check_seeds(argparse.ArgumentParser(), argparse.Namespace(seeds=seeds, overrides=[override]))
    assert complaint in capsys.readouterr().err


def test_the_seed_is_the_experiment_s_unless_others_are_asked_for() -> None:
    parser = argparse.ArgumentParser()
    add_seeds(parser, "of runs")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args(["actor.optimizer.lr=1e-4"])
    check_seeds(parser, given)
    assert given.seeds == [1]
    for config in (ONE_GPU, TWO_GPUS):
        assert load_config(ROOT / config).seed == 1


def test_a_dry_run_with_the_embedded_engine_needs_no_other_environment() -> None:
    facts = engine_facts("cpu", "no/such/python", engine="embedded")
    assert "rollout.backend=embedded:d1" in engine_overrides("cpu", facts, engine="embedded")
    with pytest.raises(ConfigError, match="no/such/python"):
        engine_facts("cpu", "no/such/python")


def test_gpu_shares_are_means_over_the_time_asked_for() -> None:
    meter = GpuMeter()
    meter.readings = [(1.0, (0.0, 1.0), (1.0, 1.0)), (2.0, (0.4, 0.8), (3.0, 5.0)), (3.0, (0.6, 0.2), (5.0, 7.0))]
    assert meter.busy(1.5, 3.5) == [0.5, 0.5]
    assert meter.memory_gb(1.5, 3.5) == [4.0, 6.0]
    assert meter.busy(8.0, 9.0) is None


def test_asynchronous_runs_are_told_beside_the_synchronous_one() -> None:
    sync = step_figures(run_of([3.0] * 8, [0.5, 0.7] * 4), GpuMeter())
    other = step_figures(run_of([1.5] * 8, [0.4, 0.6] * 4), GpuMeter())
    found = two_gpu_async.compare({"eta=0": sync, "eta=2": other, "eta=4": {"failed": "x"}})
    assert set(found) == {"eta=2"}
    assert found["eta=2"]["faster_than_sync"] == 2.0
    assert found["eta=2"]["reward_difference"] == pytest.approx(-0.1)
    # both ends are two steps that differ by 0.2: deviation 0.2/√2, error of each mean 0.1, of the difference 0.1·√2
    assert found["eta=2"]["reward_noise"] == pytest.approx(0.1414, abs=1e-4)


def test_rewards_are_compared_after_equal_steps_with_the_noise_of_those_steps() -> None:
    sync = {"seconds_per_step": 2.0, "reward": [0.0] * 16 + [9.0] * 8}
    other = {"seconds_per_step": 1.0, "reward": [0.0] * 12 + [1.0, 1.0, 0.0, 0.0]}
    found = two_gpu_async.compare({"eta=0": sync, "eta=2": other})["eta=2"]
    # of the last four of 16: a mean of 0.5, a deviation of √(1/3) and so an error of √(1/12)
    assert (found["steps"], found["reward_difference"], found["reward_noise"]) == (16, 0.5, 0.2887)
    one = two_gpu_async.compare({"eta=0": sync, "eta=4": other | {"reward": [0.25]}})["eta=4"]
    assert (one["steps"], one["reward_difference"], one["reward_noise"]) == (1, 0.25, None)


def test_all_steps_and_tokens_are_compared_beside_steady_steps() -> None:
    """An asynchronous run that was fast at its end alone."""
    sync = {**told(2.0, 0.5), "generated_tokens_per_second": 80.0, "by_step": {"step_seconds": [6.0, 2.0, 2.0, 9.0]}}
    other = {**told(1.0, 0.5), "generated_tokens_per_second": 100.0, "by_step": {"step_seconds": [6.0, 1.0, 1.0]}}
    found = two_gpu_async.compare({"eta=0": sync, "eta=2": other})["eta=2"]
    # of the three steps that both made: 10 s and 8 s
    assert (found["faster_than_sync"], found["faster_whole"], found["tokens_ratio"]) == (2.0, 1.25, 1.25)
    both = two_gpu_async.compare(
        {
            **{f"eta=0, seed {seed}": sync for seed in (1, 2, 3)},
            "eta=2, seed 1": other,
            "eta=2, seed 2": other
            | {"generated_tokens_per_second": 60.0, "by_step": {"step_seconds": [5.0, 2.0, 1.0]}},
        }
    )
    # by tokens 1.25 and 0.75: a deviation of 0.5 / √2, an error of 0.25
    several = both["over seeds"]["eta=2"]
    assert (several["tokens_ratio"], several["tokens_ratio_error"]) == (1.0, 0.25)
    assert (several["faster_whole"], several["faster_whole_error"]) == (1.25, 0.0)


@pytest.mark.parametrize("missing", ["by_step", "generated_tokens_per_second"])
def test_results_that_tell_less_are_compared_by_what_they_tell(missing: str) -> None:
    run = {**told(2.0, 0.5), "generated_tokens_per_second": 80.0, "by_step": {"step_seconds": [6.0, 2.0]}}
    less = {name: figure for name, figure in run.items() if name != missing}
    named = {"by_step": "faster_whole", "generated_tokens_per_second": "tokens_ratio"}
    runs = {"eta=0, seed 1": run, "eta=2, seed 1": less, "eta=0, seed 2": run, "eta=2, seed 2": run}
    found = two_gpu_async.compare(runs)
    assert named[missing] not in found["eta=2, seed 1"]
    assert found["eta=2, seed 2"]["faster_whole"] == found["eta=2, seed 2"]["tokens_ratio"] == 1.0
    assert named[missing] not in found["over seeds"]["eta=2"]  # not of all of them
    empty = {**run, "by_step": {"step_seconds": []}}
    assert "faster_whole" not in two_gpu_async.compare({"eta=0": empty, "eta=2": run})["eta=2"]


RATIOS = {"faster_than_sync", "faster_whole", "tokens_ratio"}


@pytest.mark.parametrize(
    ("less", "reason"),
    [
        ({"steady_steps": [2, 3]}, "fewer than 3 steady steps"),
        ({"steady_steps": [1, 1]}, "fewer than 3 steady steps"),
        ({"generated_tokens_per_second": 0.0}, "no tokens"),
        ({"steady_steps": [2, 4]}, ""),
    ],
)
@pytest.mark.parametrize("which", ["eta=0", "eta=2"])
def test_nothing_is_said_of_speed_that_too_few_steps_or_no_tokens_tell(
    which: str, less: dict[str, Any], reason: str
) -> None:
    run = {**told(2.0, 0.5), "generated_tokens_per_second": 80.0, "by_step": {"step_seconds": [6.0, 2.0]}}
    runs = {"eta=0": run, "eta=2": run} | {which: {**run, **less}}
    found = two_gpu_async.compare(runs)["eta=2"]
    assert found["steps"] == 8  # rewards are compared all the same
    assert RATIOS & set(found) == (set() if reason else RATIOS)
    assert reason in found.get("no_ratios", "")


@pytest.mark.parametrize(
    ("words", "etas", "steps"),
    [
        ("", (0, 2, 4), 8),
        ("--quick", (0, 2), 2),
        ("--quick --steps 5", (0, 2), 5),
        ("--quick --etas 4 2 0", (4, 2, 0), 2),
        ("--etas 2 --steps 1", (2,), 1),
    ],
)
def test_a_dry_run_keeps_to_what_it_is_told(words: str, etas: tuple[int, ...], steps: int) -> None:
    given = two_gpu_async._parser().parse_args(words.split())
    assert (tuple(two_gpu_async.etas_of(given)), two_gpu_async.steps_of(given, 100.0)) == (etas, steps)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", ""),
        ("--etas 2", "nothing will be compared"),
        ("--etas 2 4", "nothing will be compared"),
        ("--etas 0", "nothing will be compared"),
        ("--python no/such/python", "--python no/such/python is not used"),
    ],
)
def test_what_will_not_be_used_or_told_is_said_before_the_start(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    parser = two_gpu_async._parser()
    dry = f"--device cpu --transport shm --engine embedded --smollm2 {tmp_path}"
    two_gpu_async.check_runs(parser, parser.parse_args([*dry.split(), *words.split()]))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == bool(said) and all(said in line for line in lines)


def told(seconds: float, reward: float, **more: str) -> dict[str, Any]:
    return {"seconds_per_step": seconds, "reward": [reward] * 8, **more}


def test_runs_are_compared_with_the_synchronous_one_of_their_seed_and_over_seeds() -> None:
    found = two_gpu_async.compare(
        {
            "eta=0, seed 1": told(3.0, 0.5),
            "eta=2, seed 1": told(2.0, 0.6),
            "eta=4, seed 1": told(1.0, 0.5),
            "eta=0, seed 2": told(4.0, 0.5),
            "eta=2, seed 2": told(2.0, 0.4),
            "eta=4, seed 2": told(9.0, 0.5, failed="cut after 9 s"),
            "eta=0, seed 3": told(2.5, 0.5),
            "eta=2, seed 3": told(1.0, 0.5),
            "eta=2, seed 4": told(9.0, 0.5),  # no synchronous run of its seed
        }
    )
    ratios = {name: row["faster_than_sync"] for name, row in found.items() if name != "over seeds"}
    assert ratios == {
        "eta=2, seed 1": 1.5,
        "eta=4, seed 1": 3.0,
        "eta=2, seed 2": 2.0,
        "eta=4, seed 2": 0.444,
        "eta=2, seed 3": 2.5,
    }
    assert found["eta=2, seed 2"]["reward_difference"] == -0.1
    # 1.5, 2, 2.5: a mean of 2, a deviation of 0.5, an error of 0.5 / √3; rewards 0.1, -0.1, 0: deviation 0.1
    assert found["over seeds"] == {
        "eta=2": {
            "seeds": [1, 2, 3],
            "faster_than_sync": 2.0,
            "faster_than_sync_error": 0.2887,
            "reward_difference": 0.0,
            "reward_difference_error": 0.0577,
        }
    }  # of η = 4 one whole run is left, and that tells no spread


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("--seeds 7", ["eta=0", "eta=2"]),
        ("--seeds 2 3", ["eta=0, seed 2", "eta=2, seed 2", "eta=0, seed 3", "eta=2, seed 3"]),
    ],
)
def test_every_lag_runs_once_a_seed(
    words: str, names: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun: list[tuple[int, int]] = []

    def at_once(make: Callable[[bool], Experiment]) -> LiveRun:
        config = load_config(ROOT / TWO_GPUS, make(False).overrides)
        begun.append((config.rollout.max_head_offpolicyness, config.seed))
        return run_of([1.0] * 2, [0.5] * 2)

    monkeypatch.setattr(two_gpu_async, "run_or_fall_back", at_once)
    given = two_gpu_async._parser().parse_args(
        [*f"--quick --device cpu --engine embedded --python no/such/python {words}".split()]
    )
    found = two_gpu_async.measure(given, 60.0, tmp_path / "found.json").found
    assert [name for name in found if name.startswith("eta=")] == names
    assert begun == [(eta, seed) for seed in given.seeds for eta in (0, 2)]
    assert [found[name]["seed"] for name in names] == [seed for _, seed in begun]
    assert found["seeds"] == json.loads((tmp_path / "found.json").read_text())["seeds"] == given.seeds
    assert ("over seeds" in found["comparison"]) == (len(given.seeds) > 1)


def test_a_single_seed_is_not_averaged() -> None:
    found = two_gpu_async.compare({"eta=0": told(3.0, 0.5), "eta=2": told(2.0, 0.5)})
    assert set(found) == {"eta=2"}


def test_steps_fit_into_the_budget_and_are_never_too_few() -> None:
    assert two_gpu_async.steps_within(1e6) == 40
    assert two_gpu_async.steps_within(100) == 8
    assert two_gpu_async.steps_within(435) == 15  # (435 - 3 · 60) / (8 + 2 · 4.5)
    assert two_gpu_async.steps_within(150, [4]) == 20  # (150 - 60) / 4.5
