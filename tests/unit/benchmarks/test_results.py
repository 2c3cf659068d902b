"""Published readings: each tells its date and commit, names no machine's folders, and the README says where it is."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
_MACHINE_PATH = re.compile(r"(?<![\w.])/(?:tmp|root|opt|home|work|mnt|usr|var|data)/")


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def strings(found: Any) -> Iterator[str]:
    if isinstance(found, str):
        yield found
    elif isinstance(found, dict):
        yield from found
        for value in found.values():
            yield from strings(value)
    elif isinstance(found, list):
        for value in found:
            yield from strings(value)


def rows(text: str, heading: str) -> list[list[str]]:
    """Cells of the first table after ``heading``, without its head."""
    lines = iter(text[text.index(heading) :].splitlines())
    table: list[str] = []
    for line in lines:
        if line.startswith("|"):
            table.append(line)
        elif table:
            break
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_tells_its_date_and_commit(path: Path) -> None:
    found = read(path)
    if isinstance(found, list):
        runs = found
    else:
        dated = "date" in found  # a file of several calls tells them of each part
        runs = [found] * dated + list(found.get("parts", {}).values())
        runs += [earlier for run in runs for earlier in run.get("earlier", [])]
    assert runs
    for run in runs:
        assert re.match(r"20\d\d-\d\d-\d\d", run["date"])
        assert re.fullmatch(r"[0-9a-f]{7,40}\S*", run["commit"])


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_names_no_folder_of_a_machine(path: Path) -> None:
    assert [text for text in strings(read(path)) if _MACHINE_PATH.search(text)] == []


def test_every_reading_of_the_readme_has_its_command_and_its_file() -> None:
    table = rows((ROOT / "README.md").read_text(encoding="utf-8"), "## Performance")
    assert len(table) > 10
    for _, _, command, where in table:
        script = re.match(r"`(benchmarks/[\w/]+\.py)`", command)
        link = re.fullmatch(r"\[json\]\((benchmarks/results/\w+\.json)\)", where)
        assert script is not None and (ROOT / script[1]).is_file(), command
        assert link is not None and (ROOT / link[1]).is_file(), where


def test_the_train_steps_table_is_the_file() -> None:
    """Every row's figures are those of one reading of its commit and shape."""
    newest = read(ROOT / "benchmarks" / "results" / "train_step_h200.json")
    shown = set()
    for run in (newest, *newest["earlier"]):
        for reading in run["readings"]:
            if "mfu" in reading:
                above = f"{reading['above_resident_gb']:.1f}" if "above_resident_gb" in reading else ""
                figures = f"{reading['mfu']:.2f}", f"{reading['peak_gb']:.1f}", above
                shown.add(
                    (reading["shape"].upper(), run["commit"][:7], *figures, round(reading["tokens_per_second"], -2))
                )
    shape, table = "", rows((ROOT / "docs" / "training.md").read_text(encoding="utf-8"), "## Speed on one H200")
    assert len(table) > 10
    for first, name, commit, rate, *figures in table:
        shape = first or shape
        tokens = float(rate.removesuffix("k")) * 1e3
        digit = 100 if "." in rate else 1000
        close = [r for *row, r in shown if row == [shape, commit, *figures] and abs(r - tokens) <= digit / 2 + 50]
        assert len(close) == 1, (shape, name, close)


def test_the_weight_updates_tables_are_the_files() -> None:
    """The page's rows, newest and earlier, and the seconds in the README's."""
    files = {"NCCL": ("two_gpu_h200", "a", ""), "CUDA IPC": ("weight_sync_h200", "6b", "ipc, ")}
    found: dict[tuple[str, str], Any] = {}
    for way, (name, part, prefix) in files.items():
        newest = read(ROOT / "benchmarks" / "results" / f"{name}.json")["parts"][part]
        for run in (newest, *newest["earlier"]):
            updates = run["found"].get("6b", run["found"])["updates"]
            found[way, run["commit"]] = [updates[prefix + mode] for mode in ("keep", "recompute")]
    table = rows((ROOT / "docs" / "readings.md").read_text(encoding="utf-8"), "## Weight updates")
    assert len(table) == len(found)
    for way, commit, *shown in table:
        keep, recompute = found.pop((way.partition(",")[0], commit))
        seconds = [keep["exported"], keep.get("broadcast"), keep["paused"], recompute["paused"]]
        seconds += [keep["whole"], recompute["whole"]]
        assert shown == ["" if value is None else f"{value:.3f}" for value in seconds], (way, commit)
        readme = (
            f"{way.partition(',')[0]}, 256",
            f"paused {keep['paused']:.2f} s (`keep`), {recompute['paused']:.2f} s",
        )
        if commit == table[0][1]:
            lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
            assert any(all(text in line for text in readme) for line in lines), readme


def page(heading: str) -> list[list[str]]:
    return rows((ROOT / "docs" / "readings.md").read_text(encoding="utf-8"), heading)


def told(value: float) -> str:
    """.718"""
    return f"{value:.3f}".replace("0.", ".", 1)


def test_the_table_of_updates_through_the_host_is_the_file() -> None:
    updates = read(ROOT / "benchmarks" / "results" / "weight_sync_h200.json")["parts"]["6b, host"]["found"]["updates"]
    shown = page("### Through host memory")
    assert [way for way, *_ in shown] == ["`shm`", "`disk`"]
    for way, *cells in shown:
        keep, recompute = (updates[f"{way.strip('`')}, {mode}"] for mode in ("keep", "recompute"))
        assert keep["right"] and recompute["right"]
        assert cells == [
            *(f"{keep[name]:.2f}" for name in ("exported", "staged")),
            *(f"{run['paused']:.3f}" for run in (keep, recompute)),
            *(f"{run['whole']:.1f}" for run in (keep, recompute)),
            f"{keep['bytes'] / keep['whole'] / 1e9:.2f}",
        ]


def test_the_tables_of_two_gpus_are_the_file() -> None:
    """Every run is shown; the ratios are those of its seconds, rewards those of its last quarter; as the README's."""
    found = read(ROOT / "benchmarks" / "results" / "two_gpu_h200.json")["parts"]["b"]["found"]
    runs = {name.removeprefix("eta="): run for name, run in found.items() if name.startswith("eta=")}
    assert all("failed" not in run and run["steps"] == found["steps"] for run in runs.values())
    table = page("## Synchronous against asynchronous on two GPUs")
    assert [eta for eta, *_ in table] == list(runs)
    for eta, *cells in table:
        run = runs[eta]
        assert cells == [
            *(f"{run[name]:.2f}" for name in ("seconds_per_step", "wait_seconds", "update_seconds")),
            f"{run['publish_seconds']:.2f}, {run['pause_seconds']:.2f}",
            f"{run['generated_tokens_per_second']:,.0f}",
            f"{sum(run['by_step']['step_seconds']):.0f}",
            told(fmean(run["reward"][-15:])),
        ]
    beside = page("| η | times as fast")
    assert [eta for eta, *_ in beside] == [eta for eta in runs if eta != "0"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for eta, steady, whole, tokens, reward in beside:
        sync, run = runs["0"], runs[eta]
        seconds = [sum(r["by_step"]["step_seconds"]) for r in (sync, run)]
        ends = [r["reward"][-15:] for r in (sync, run)]
        difference = fmean(ends[1]) - fmean(ends[0])
        noise = math.sqrt(sum(stdev(end) ** 2 / 15 for end in ends))
        assert steady == f"{sync['seconds_per_step'] / run['seconds_per_step']:.2f}"
        assert whole == f"{seconds[0] / seconds[1]:.2f}"
        assert tokens == f"{run['generated_tokens_per_second'] / sync['generated_tokens_per_second']:.2f}"
        assert reward == f"{difference:.3f} ± {noise:.3f}".replace("0.", ".")
        assert f"{difference:.2f} ± {noise:.2f}".replace("0.", ".") in readme
    assert f"{beside[0][2]} / {beside[1][2]} times as fast, all steps counted" in readme


def test_what_a_token_costs_the_api_server_is_the_file() -> None:
    result = read(ROOT / "benchmarks" / "results" / "token_path.json")
    costs = {}
    for path, found in result["readings"].items():
        costs[path] = round(fmean(reading["microseconds_per_token"] for reading in found))  # two: mean and median alike
    assert result["engine_version"].startswith("0.32")
    ours, completions, generate = (costs[path] for path in ("ours", "completions", "generate"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{ours}, {completions}, {generate} µs of one CPU core" in readme
    engines = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    assert f"costs it {completions} µs at vLLM's `/v1/completions`, {generate} µs at" in engines
    assert f"and {ours} µs at ours" in engines


def test_the_table_of_earlier_runs_on_two_gpus_is_the_file() -> None:
    """Ratios of seconds of the steps that both made; none where a run told no seconds step by step."""
    newer, older = read(ROOT / "benchmarks" / "results" / "two_gpu_h200.json")["parts"]["b"]["earlier"][:2]
    runs = {
        (newer["commit"], host.split()[0], str(run["seed"]), name[4]): run
        for host in ("quiet host", "busy host")
        for name, run in newer["found"][host].items()
    }
    runs |= {(older["commit"], "busy", "1", name[4]): r for name, r in older["found"].items() if name[:4] == "eta="}
    table = page("| commit | host | seed | η |")
    assert len(table) == 5
    for commit, host, seed, eta, later, whole, tokens, _ in table:
        sync, run = (runs[commit, host, seed, asked] for asked in ("0", eta))
        assert later == f"{sync['seconds_per_step'] / run['seconds_per_step']:.2f}"
        assert tokens == f"{run['generated_tokens_per_second'] / sync['generated_tokens_per_second']:.2f}"
        if "by_step" in run:
            both = min(sync["steps"], run["steps"])
            seconds = [sum(r["by_step"]["step_seconds"][:both]) for r in (sync, run)]
            assert whole == f"{seconds[0] / seconds[1]:.2f}"
        else:
            assert whole == ""


def test_the_learning_table_is_the_file() -> None:
    """Every run is in it; means and standard errors over seeds, worked out here."""
    result = read(ROOT / "benchmarks" / "results" / "learning_h200.json")
    found: dict[tuple[str, str, float], dict[str, Any]] = {}
    for part in ("timed", "side by side"):
        for name, run in result[part].items():
            words = re.fullmatch(r"eta=(\d+) (.+?)(?:, seed (\d+))?", name)
            assert words is not None
            kind = words[1], words[2], result["parts"][part]["learning_rate"]
            found.setdefault(kind, {})[words[3] or "1"] = run
    table = page("| η | objective | lr |")
    assert {(eta, what, float(rate)) for eta, what, rate, *_ in table} == found.keys()
    for eta, what, rate, seeds, *cells in table:
        runs = found[eta, what, float(rate)]
        assert seeds == ", ".join(sorted(runs))
        held = [{version: reward for version, reward, _ in run["held_out"]} for run in runs.values()]
        figures = [[run[version] for run in held] for version in range(0, 70, 10)]
        figures += [
            [fmean(run["reward"][steps]) for run in runs.values()] for steps in (slice(10, 20), slice(-10, None))
        ]
        errors = [f" ± {told(stdev(f) / math.sqrt(len(f)))}" if len(f) > 1 else "" for f in figures]
        assert cells == [told(fmean(f)) + error for f, error in zip(figures, errors, strict=True)]


def test_the_learning_means_in_the_readme_are_the_pages() -> None:
    means = {
        (eta, what): (float(cells[1].split()[0]), float(cells[6].split()[0]))
        for eta, what, rate, _, *cells in page("| η | objective | lr |")
        if float(rate) == 1e-5
    }
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(
        r"means of three seeds \| .*naive ([\d./ ]+), decoupled ([\d./ ]+); after 60: ([^,]+), ([^(]+) \(", text
    )
    assert shown is not None
    for cells, what, place in zip(shown.groups(), ("naive PPO", "decoupled") * 2, (0, 0, 1, 1), strict=True):
        values = [float(cell) for cell in cells.split(" / ")]
        assert all(abs(v - means[eta, what][place]) <= 0.0051 for v, eta in zip(values, "028", strict=True)), cells
