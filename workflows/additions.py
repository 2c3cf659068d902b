"""``python -m workflows.additions FOLDER``: sums of two numbers as chats, ``train.jsonl`` and ``valid.jsonl``.

A few sums are shown solved first: a small model then answers with a number alone, and gets some of them right, so that
there is something to learn from (SmolLM2-135M: about one in seven of the default ones). Every row also has a
``length`` for ``workflows.long_tail``.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SYSTEM = "You are a calculator. You answer with one number and nothing else."
#: what is shown solved; never asked
_SHOWN = ((3, 4), (7, 5), (9, 2), (6, 8))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """``lowest`` to ``highest``: the numbers added. Lengths are log-normal: ``median``, ``spread`` (σ of the log),
    cut to ``shortest`` and ``longest`` tokens."""

    lowest: int = 1
    highest: int = 12
    train: int = 108
    valid: int = 32
    median: float = 128.0
    spread: float = 1.0
    shortest: int = 32
    longest: int = 2048


def rows(task: Task, seed: int) -> list[dict[str, Any]]:
    """``task.valid + task.train`` different sums, the held-out ones first; the same for the same seed.

    Raises:
        ValueError: there are not that many.
    """
    numbers = range(task.lowest, task.highest + 1)
    pairs = [(x, y) for x in numbers for y in numbers if (x, y) not in _SHOWN]
    wanted = task.valid + task.train
    if wanted > len(pairs):
        raise ValueError(f"{task.lowest} to {task.highest} make {len(pairs)} sums, and {wanted} were asked for")
    rng = random.Random(seed)
    return [_row(x, y, _length(task, rng)) for x, y in rng.sample(pairs, wanted)]


def write(folder: Path, task: Task, seed: int = 1) -> None:
    """Both files."""
    found = rows(task, seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("valid", found[: task.valid]), ("train", found[task.valid :])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


def _row(x: int, y: int, length: int) -> dict[str, Any]:
    shown = [turn for a, b in _SHOWN for turn in _solved(a, b)]
    messages = [{"role": "system", "content": _SYSTEM}, *shown, _asked(x, y)]
    return {"messages": messages, "answer": str(x + y), "length": length}


def _solved(x: int, y: int) -> list[dict[str, str]]:
    return [_asked(x, y), {"role": "assistant", "content": str(x + y)}]


def _asked(x: int, y: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {x} + {y}?"}


def _length(task: Task, rng: random.Random) -> int:
    drawn = round(task.median * math.exp(task.spread * rng.gauss(0.0, 1.0)))
    return min(max(drawn, task.shortest), task.longest)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m workflows.additions", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the files go, such as models/smollm2/additions")
    parser.add_argument("--numbers", type=int, nargs=2, default=(1, 12), metavar=("LOWEST", "HIGHEST"))
    parser.add_argument("--train", type=int, default=108)
    parser.add_argument("--valid", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    lowest, highest = given.numbers
    write(given.folder, Task(lowest=lowest, highest=highest, train=given.train, valid=given.valid), given.seed)


if __name__ == "__main__":
    main()
