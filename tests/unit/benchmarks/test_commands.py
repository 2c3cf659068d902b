"""The benchmarks as commands: what each can be asked, what it refuses at once, and its exit status."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest

sys.path.insert(0, str(Path(__file__).parents[3]))

from areal_like.config.load import load_config
from benchmarks.demo_runs import ROOT
from benchmarks.gpu import learning, two_gpu_async
from benchmarks.gpu.live_runs import TWO_GPUS, Experiment, Report
from benchmarks.gpu.refusals import check_out

FOLDER = ROOT / "benchmarks"
#: trl_step.py imports a package that lives in an environment of its own
SCRIPTS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted([*FOLDER.glob("*.py"), *FOLDER.glob("gpu/*.py")])
    if "__main__" in path.read_text() and path.name != "trl_step.py"
]
HERE = Path(sys.executable)
CPU, DRY, NO_MODEL = ["--device", "cpu"], ["--quick", "--engine", "embedded"], ["--smollm2", "no/such/model"]
#: what two_gpu.py would begin on a CPU with shapes of gigabytes
TWO_GPUS_NEEDED = [[], ["--engine", "embedded"], ["--parts", "d"], ["--parts", "b", "--engine", "embedded"]]
#: of runs of an experiment, which would each be started twice and fail
RUNS_REFUSED = [
    ("--steps 0", "--steps 0: a number from 1 up"),
    ("--steps -3", "--steps -3: a number from 1 up"),
    ("--etas -1", "--etas -1: a number from 0 up"),
    ("--etas 0 0", "--etas 0 0: different numbers"),
    ("--seeds 1 1", "--seeds 1 1: different numbers"),
    ("--steps 2 actor.optimzer.lr=1", "actor.optimzer.lr.*actor.optimizer.lr"),
    ("--steps 2 actor.optimizer.lr=fast", "actor.optimizer.lr"),
    ("--steps 2 nonsense", "key=value"),
    ("--steps 2 +total_train_steps=9", "--etas, --seeds and --steps"),
    ("--steps 2 rollout.max_head_offpolicyness=3", "--etas, --seeds and --steps"),
    ("--smollm2 no/such/model", "--smollm2 no/such/model: no config.json.*make smollm2"),
    ("--steps 2 model.path=no/such/model", "no/such/model: no config.json"),
]
#: those with a budget and a file
LIMITED = [f"gpu.{name}" for name in (
    "two_gpu", "two_gpu_async", "weight_sync", "learning", "generation", "embedded_decode", "train_step",
    "train_step_ranks",
)]  # fmt: skip
NO_FILES = [".", str(HERE / "found.json"), "/proc/none/found.json"]


class Parsed(Exception):
    """The parser of a command, taken as it begins."""


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts import those beside them by their plain names."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), str(FOLDER / "gpu"), *sys.path])


@pytest.mark.usefixtures("paths")
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_tells_what_it_can_be_asked_and_writes_where_it_is_told_alone(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse_args(parser: argparse.ArgumentParser, *words: Any) -> NoReturn:
        raise Parsed(parser)

    main = import_module(script).main
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    with pytest.raises(Parsed) as told:
        main()
    (parser,) = told.value.args
    assert "usage:" in parser.format_help()
    assert parser.get_default("out") is None  # else a try would write over a published result


@pytest.mark.usefixtures("paths")
@pytest.mark.parametrize(
    ("script", "words", "complaint"),
    [
        ("gpu.weight_sync", ["--quick", "--python", str(HERE)], "vllm is not installed.* --engine embedded"),
        ("gpu.weight_sync", ["--quick", "--python", "no/such/python"], "no/such/python"),
        ("gpu.weight_sync", ["--quick", "--modes", "nonsense"], "nonsense"),
        ("gpu.weight_sync", ["--quick", "--transports", "nonsense"], "nonsense"),
        ("gpu.two_gpu", ["--quick", "--parts", "a", "--python", str(HERE)], "vLLM is not inst.* --engine embedded"),
        ("gpu.two_gpu", ["--quick", "--modes", "nonsense"], "nonsense"),
        ("gpu.two_gpu_async", ["--device", "cpu", "--python", str(HERE)], "vLLM is not installed.* --engine embedded"),
        ("gpu.two_gpu_async", ["--transport", "nonsense"], "nonsense"),
        *(("gpu.two_gpu", words, "needs 2 GPUs.* --quick") for words in TWO_GPUS_NEEDED),
        ("gpu.two_gpu_async", [], "needs 2 GPUs.* --quick --device cpu"),
        *(
            (script, [*dry, *words.split()], complaint)
            for script, dry in (("gpu.two_gpu", [*DRY, "--parts", "b"]), ("gpu.two_gpu_async", [*DRY, *CPU]))
            for words, complaint in RUNS_REFUSED
        ),
        ("gpu.two_gpu", [*DRY, "--parts", "a", "c", "--steps", "3"], "part b's"),
        ("gpu.two_gpu", [*DRY, "--disk", "no/such/folder"], "--disk no/such/folder: .*No such file"),
        ("gpu.weight_sync", [*DRY, "--disk", str(HERE)], "--disk .*Not a directory"),
        *((script, ["--seconds", n], "--seconds") for script in LIMITED for n in ("-4", "0", "nan")),
        *((script, ["--out", out], "--out") for script in LIMITED for out in NO_FILES),
        ("gpu.cuda_runs", ["--out", "."], "--out .: that is a folder"),
        ("gpu.learning", [*CPU, "--engine", "embedded", *NO_MODEL], "no/such/model: no config"),
        ("gpu.embedded_decode", [*CPU, "--parts", "embedded", *NO_MODEL], "no/such/model: no config"),
        ("gpu.learning", ["--device", "cpu", "--python", str(HERE)], "vLLM is not installed.* --engine embedded"),
        ("gpu.learning", ["--transport", "nonsense"], "nonsense"),
        ("gpu.learning", [], "needs a GPU.* --device cpu"),
        ("gpu.generation", ["--quick", "--device", "cpu", "--python", str(HERE)], "vLLM is not installed"),
        ("gpu.generation", [], "needs a GPU"),
        ("gpu.embedded_decode", [], "needs a GPU.* --device cpu"),
        ("gpu.embedded_decode", ["--device", "cpu", "--python", str(HERE)], "vLLM is not .* --parts embedded"),
        ("gpu.train_step", [], "needs a GPU.* --quick"),
        ("gpu.train_step", ["--only", "nonsense", "--quick"], "'nonsense': no such reading.*ours, mixed rows"),
        ("gpu.train_step", ["--shapes", "9b", "--list"], "9b"),
        ("gpu.train_step", ["--only", "nonsense", "--list"], "nonsense"),
        ("gpu.train_step_ranks", ["--shapes", "9b"], "9b"),
        ("gpu.load_client", [], "AREAL_LIKE_TOKEN is not set"),
        ("gpu.two_gpu_deaths", [], "required"),
        ("gpu.two_gpu_deaths", ["embedded", "s0", "http://127.0.0.1:1", "tiny", "1"], "AREAL_LIKE_TOKEN is not set"),
        ("train_step", ["--shapes", "9b"], "9b"),
        ("weight_sync", ["--engines", "nonsense"], "nonsense"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_sentence(
    script: str, words: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = import_module(f"benchmarks.{script}").main
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *words])
    monkeypatch.delenv("AREAL_LIKE_TOKEN", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    (line,) = [line for line in said.splitlines() if ": error: " in line]
    assert re.search(complaint, line), line


def test_a_file_that_can_be_written_is_not_refused_and_not_touched(tmp_path: Path) -> None:
    parser, old = argparse.ArgumentParser(), tmp_path / "old.json"
    old.write_text("{}")
    for out in (None, old, tmp_path / "new" / "folders" / "found.json"):
        check_out(parser, out)
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"] and old.read_text() == "{}"


def failing() -> NoReturn:
    raise ValueError("no such luck")


@pytest.mark.parametrize(
    ("measures", "status"),
    [
        ([dict], 0),
        ([failing], 1),
        ([dict, failing], 1),
        ([lambda: {"eta=2": {"reward": [1.0]}, "eta=4": {"failed": "cut"}}], 1),
        ([], 1),
    ],
)
def test_the_exit_status_tells_of_failures(measures: list[Callable[[], Any]], status: int) -> None:
    report = Report(None, "some", budget=60.0)
    for number, measure in enumerate(measures):
        report.part(str(number), measure)
    report.part("no time", dict, needs=100.0)
    assert report.status == status


def test_a_part_that_succeeds_at_the_second_try_has_not_failed() -> None:
    report = Report(None, "some", budget=60.0)
    report.part("server", failing)
    report.part("server", dict)
    assert report.status == 0


@pytest.mark.usefixtures("paths")
def test_engines_that_were_not_run_are_no_success() -> None:
    status_of = import_module("benchmarks.weight_sync").status_of
    assert [status_of(rows) for rows in ([{"not_run": "x"}], [{"not_run": "x"}, {"shm": 1}], [{"failed": "x"}])] == [
        1, 0, 1,
    ]  # fmt: skip


NOT_RUN = {"not_run": "the time was over"}


@pytest.mark.usefixtures("paths")
@pytest.mark.parametrize(
    ("found", "status"),
    [
        ({"gpus": 2}, 1),
        ({"gpus": 2, "a": NOT_RUN, "c": NOT_RUN}, 1),
        ({"a": {"tiny": NOT_RUN}, "b": {"steps": 8, "eta=0": "not run: it needs 60 s", **NOT_RUN}}, 1),
        ({"a": {"tiny": {"updates": {"keep": {"right": True}}}}, "b": NOT_RUN}, 0),
        ({"a": {"tiny": {"updates": {"keep": {"right": False}}}}}, 1),
        ({"d": {"tests_passed": True}, "b": {"eta=0": {"failed": "cut"}}}, 1),
    ],
)
def test_parts_that_measured_nothing_are_no_success(found: dict[str, Any], status: int) -> None:
    assert import_module("benchmarks.gpu.two_gpu").status_of(found) == status


@pytest.mark.usefixtures("paths")
@pytest.mark.parametrize("seconds", [60.0, 240.0])
def test_part_b_runs_what_two_gpus_are_asked_for(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its interpreter, engine, model, steps, η and overrides; with too little time it measured nothing."""
    two_gpu, begun = import_module("benchmarks.gpu.two_gpu"), []

    def none(make: Callable[[bool], Experiment]) -> NoReturn:
        begun.append(load_config(ROOT / TWO_GPUS, make(False).overrides))
        raise RuntimeError("no such luck")

    monkeypatch.setattr(two_gpu_async, "run_or_fall_back", none)
    parser = argparse.ArgumentParser()
    two_gpu.add_options(parser, seconds=seconds)
    two_gpu.add_runs(parser)
    words = f"--python {HERE} --engine embedded --smollm2 some/model --etas 3 0 --steps 7 actor.optimizer.lr=0.5"
    options = parser.parse_args(words.split())
    options.device, options.out = "cpu", tmp_path / "found.json"
    bench = two_gpu.Bench(options=options, folder=tmp_path, device=None, end=time.monotonic() + seconds)
    row: dict[str, Any] = {}
    two_gpu.part_b(bench, row)
    assert [config.rollout.max_head_offpolicyness for config in begun] == ([] if seconds < 100 else [3, 0])
    assert "not_run" in row and not two_gpu.measured(row)
    for config in begun:
        assert (config.total_train_steps, config.actor.optimizer.lr, config.model.path) == (7, 0.5, "some/model")
        assert config.rollout.backend == "embedded:d1"


@pytest.mark.usefixtures("paths")
def test_what_is_no_number_is_null_in_json_and_shown_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    train_step = import_module("benchmarks.gpu.train_step")
    reading = {
        "name": "ours", "shape": "tiny", "mfu": float("nan"), "rates": (1.5, float("inf")), "peak_gb": 1.0,
        "tokens_per_second": 2000.0,
    }  # fmt: skip
    found = {"date": "d", "commit": "c", "matmul_flops_per_second": float("nan"), "readings": [reading]}
    told = json.loads(train_step.as_json(found), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    nothing = {"mfu": None, "rates": [1.5, None]}
    assert told == found | {"matmul_flops_per_second": None, "readings": [reading | nothing]}
    train_step.show(told)
    assert "| tiny | ours | 2.0k | nan |" in capsys.readouterr().out


@pytest.mark.usefixtures("paths")
def test_readings_that_failed_or_are_missing_are_no_success() -> None:
    status_of = import_module("benchmarks.gpu.train_step").status_of
    fine = {"name": "ours", "tokens_per_second": 1.0}
    assert status_of([fine, {"name": "hf", "out_of_memory": "x"}]) == 0
    assert status_of([fine, {"name": "hf", "failed": "x"}]) == status_of([{"name": "failed"}]) == status_of([]) == 1


def test_a_figure_without_matplotlib_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "found.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "argv", ["learning.py", "--plot", str(tmp_path / "found.json")])
    assert learning.main() == 1
    assert capsys.readouterr().out.splitlines() == [learning.NOT_DRAWN]
