"""Published readings: each tells its date and commit, names no machine's folders, and the README says where it is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
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
