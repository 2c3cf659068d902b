"""Runs of an experiment as a user starts them, and what they came to. Shared by the benchmarks beside it."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
#: steps over which the training reward is averaged before it is compared with a threshold
_WINDOW = 5
#: seconds that a run which was asked to end gets
_GRACE = 15.0
#: asks for the death signal, then becomes what it was told to run
_BOUND = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
os.environ["AREAL_LIKE_PARENT_PID"] = sys.argv[2]
from launcher.child import PARENT_VARIABLE, die_with_parent
die_with_parent(signal.SIGTERM)
del os.environ[PARENT_VARIABLE]
try:
    os.execvp(sys.argv[3], sys.argv[3:])
except OSError as error:
    sys.exit(f"{sys.argv[3]}: {error.strerror}")
"""


def bound(command: Sequence[str]) -> list[str]:
    """``command`` as a process that gets SIGTERM when this one dies, whatever kills it (on Linux).

    The kernel looks at the *thread* that starts it: one that ends before takes it along.
    """
    return [sys.executable, "-I", "-S", "-c", _BOUND, str(ROOT), str(os.getpid()), *command]


def leave_on_signals() -> None:
    """SIGTERM and SIGHUP leave by way of every ``finally``, as Ctrl-C does: temporary folders go, children end."""

    def leave(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRun:
    """One finished run. ``wall_seconds``: from the command's start to its exit; ``steps``: its metrics, one a step."""

    wall_seconds: float
    summary: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]

    @property
    def training_seconds(self) -> float:
        """From the first batch's wait to the last step's end."""
        return float(self.steps[-1]["seconds"]) - float(self.steps[0]["seconds"]) + float(self.steps[0]["step_seconds"])

    @property
    def steps_per_second(self) -> float:
        return len(self.steps) / self.training_seconds

    def seconds_to(self, reward: float) -> float | None:
        """Seconds of training until the mean training reward of the last 5 steps reaches ``reward``."""
        began = float(self.steps[0]["seconds"]) - float(self.steps[0]["step_seconds"])
        for end in range(_WINDOW, len(self.steps) + 1):
            if fmean(float(s["reward"]) for s in self.steps[end - _WINDOW : end]) >= reward:
                return float(self.steps[end - 1]["seconds"]) - began
        return None


def build_model(folder: Path, *, seed: int) -> None:
    """The guessing game's model and data, unless they are there."""
    command = [sys.executable, "-m", "launcher.tiny_models", "guess", str(folder), "--seed", str(seed)]
    _run_in_order(command, stderr=None, env={**os.environ, "OMP_NUM_THREADS": "1"})


def run_demo(*, seed: int, models: Path, runs: Path, trial: str, overrides: Sequence[str] = ()) -> DemoRun:
    """Run ``configs/guess_cpu.yaml`` with ``seed``.

    Raises:
        subprocess.CalledProcessError: the run failed.
    """
    folder = models / f"guess-{seed}"
    build_model(folder, seed=seed)
    command = [
        sys.executable, "-m", "launcher", "run", "configs/guess_cpu.yaml", "--force", "--plain",
        f"seed={seed}", f"trial_name={trial}", f"runs_dir={runs}", f"model.path={folder}/model",
        f"train_dataset.path={folder}/train.jsonl", f"valid_dataset.path={folder}/test.jsonl", *overrides,
    ]  # fmt: skip
    started = time.monotonic()
    _run_in_order(command)
    wall = time.monotonic() - started
    root = runs / "guess" / trial
    records = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    return DemoRun(
        wall_seconds=wall,
        summary=json.loads((root / "summary.json").read_text()),
        steps=[r for r in records if "step" in r],
    )


def _run_in_order(command: Sequence[str], **pipes: Any) -> None:
    """See it through; where this is broken off it gets time to end what it started.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(bound(command), cwd=ROOT, start_new_session=True, **silent | pipes) as process:
        try:
            status = process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)  # which takes away what is half built
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    if status:
        raise subprocess.CalledProcessError(status, list(command))


def provenance() -> dict[str, Any]:
    """Commit, versions, machine and date, for a result file."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")}
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        **versions,
    }


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**provenance(), **result}, indent=2) + "\n", encoding="utf-8")
