import json
import math
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from workflows.additions import Task, rows, write

ROOT = Path(__file__).parents[3]


def asked(row: dict[str, object]) -> tuple[int, int]:
    """The numbers of the row's own question, read back from its text."""
    messages = row["messages"]
    assert isinstance(messages, list)
    found = re.fullmatch(r"What is (\d+) \+ (\d+)\?", messages[-1]["content"])
    assert found is not None
    return int(found[1]), int(found[2])


def test_every_row_is_another_sum_and_its_answer_is_right() -> None:
    found = rows(Task(lowest=2, highest=19, train=200, valid=50), seed=3)
    pairs = [asked(row) for row in found]
    assert len(set(pairs)) == len(pairs) == 250
    assert all(
        row["answer"] == str(x + y) and 2 <= min(x, y) <= max(x, y) <= 19
        for row, (x, y) in zip(found, pairs, strict=True)
    )


def test_held_out_sums_are_not_trained_on_nor_shown(tmp_path: Path) -> None:
    write(tmp_path, Task(lowest=2, highest=19, train=200, valid=50))
    train, valid = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "valid")
    )
    assert (len(train), len(valid)) == (200, 50)
    assert not {asked(row) for row in train} & {asked(row) for row in valid}
    shown = [turn["content"] for turn in valid[0]["messages"][1:-1] if turn["role"] == "user"]
    assert shown
    assert not {f"What is {x} + {y}?" for row in (train, valid) for x, y in map(asked, row)} & set(shown)


def test_lengths_are_log_normal_within_their_limits() -> None:
    found = [row["length"] for row in rows(Task(lowest=10, highest=99, train=3000, valid=1), seed=1)]
    assert 32 <= min(found) <= max(found) <= 2048
    assert 118 < median(found) < 138  # median 128; its standard error is 128 · 1.25 / sqrt(3000) = 3
    above = sum(length > 128 * math.e for length in found) / len(found)
    assert 0.14 < above < 0.18  # one σ above: 0.159


def test_the_same_seed_makes_the_same_rows() -> None:
    task = Task(train=20, valid=5)
    assert rows(task, 1) == rows(task, 1) != rows(task, 2)


def test_more_sums_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="77 sums"):
        rows(Task(lowest=1, highest=9, train=100, valid=1), seed=1)


def test_the_command_writes_both_files(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "workflows.additions", str(tmp_path / "sums"), "--train", "8", "--valid", "2"]
    subprocess.run(words, cwd=ROOT, check=True)
    assert len((tmp_path / "sums" / "train.jsonl").read_text().splitlines()) == 8
