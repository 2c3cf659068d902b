"""Whole runs as a user starts them: ``python -m launcher ...`` in a folder of one's own, and what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from areal_like.config.paths import RunPaths
from areal_like.observe.metrics import read_metrics
from areal_like.observe.trace import read_trace
from areal_like.weights.segments import list_segments
from launcher.leftovers import sweep

#: seconds a whole short run may take on a machine that does other things too
PATIENCE = 150.0
#: seconds between two looks at what another process does
_LOOK = 0.02

#: user code of the tests, in the folder the runs are started in
TASKS = '''
"""Tasks that are slow, broken or stuck on purpose."""
import asyncio
import time

from areal_like.api import RolloutWorkflow

def even_share(prompt, completions, prompt_ids, completion_ids, **data):
    """The share of even digits: easy to learn, and never the same for all siblings."""
    digits = [int(word) for word in completions.split() if word.isdigit()]
    return sum(d % 2 == 0 for d in digits) / max(1, len(digits))

def broken_reward(prompt, completions, prompt_ids, completion_ids, **data):
    raise LookupError("no such answer key")

def stuck_reward(prompt, completions, prompt_ids, completion_ids, **data):
    time.sleep(1000)

class Broken(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        raise ZeroDivisionError("this workflow always fails")

class Blocking(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        print("blocking now", flush=True)
        time.sleep(1000)

class Waiting(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        await asyncio.sleep(1000)
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended, and what it said."""

    status: int
    out: str
    err: str
    seconds: float


@dataclass(slots=True, kw_only=True)
class Launched:
    """A command under way. ``paths`` are those of the run it makes."""

    process: subprocess.Popen[bytes]
    paths: RunPaths
    out_file: Path
    err_file: Path
    started: float
    children: list[psutil.Process] = field(default_factory=list)
    ports: set[tuple[str, int]] = field(default_factory=set)

    @property
    def run_id(self) -> str:
        """From the lock, which says who holds the run's folder."""
        return str(json.loads(self.paths.lock.read_text())["run_id"])

    def until(self, holds: Callable[[], Any], what: str, *, seconds: float = PATIENCE) -> Any:
        """Wait until ``holds`` returns something true, while the process runs; returns that."""
        deadline = time.monotonic() + seconds
        while not (found := holds()):
            assert self.process.poll() is None, f"ended before {what}: {self.said()}"
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}; so far: {self.said()}"
            time.sleep(_LOOK)
        return found

    def until_steps(self, count: int) -> None:
        """Wait for ``count`` steps, and note which processes and ports the run has."""
        self.until(lambda: len(steps_of(self.paths)) >= count, f"{count} steps")
        self.note_processes()

    def note_processes(self) -> None:
        self.children = psutil.Process(self.process.pid).children(recursive=True)
        self.ports = {port for child in self.children for port in _listening(child)}

    def child(self, role: str) -> psutil.Process:
        """The process that plays ``role``, such as ``train-0``."""
        spec = f"{role}.json"
        (found,) = [c for c in self.children if _lives(c) and any(Path(word).name == spec for word in c.cmdline())]
        return found

    def press_ctrl_c(self) -> None:
        """As a terminal does: the signal goes to the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, seconds: float = PATIENCE) -> Ended:
        """Wait for its end; ``Ended.seconds`` counts from this call."""
        began = time.monotonic()
        status = self.process.wait(seconds)
        return Ended(
            status=status,
            out=self.out_file.read_text(),
            err=self.err_file.read_text(),
            seconds=time.monotonic() - began,
        )

    def said(self) -> str:
        return self.err_file.read_text()[-4000:]

    def left(self) -> dict[str, Any]:
        """Everything of the run that is still there although its process has ended; empty after a clean end."""
        alive = [c for c in {*self.children, *_processes_of(self.run_id)} if _lives(c)]
        left = {
            "processes": [(c.pid, c.name()) for c in alive],
            "ports": sorted(self.ports & _listening()),
            "shared memory": list(list_segments(self.run_id)),
            "sockets": [str(p) for p in socket_folders(self.run_id)],
        }
        return {kind: found for kind, found in left.items() if found}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """A folder with a tiny model, data, user code and one experiment file that starts quickly and ends soon."""

    folder: Path
    running: list[Launched] = field(default_factory=list)

    @property
    def experiment(self) -> Path:
        return self.folder / "exp.yaml"

    def paths(self, trial: str) -> RunPaths:
        return RunPaths(root=self.folder / "runs" / "tiny" / trial)

    def start(self, *words: str, trial: str = "cpu") -> Launched:
        """``python -m launcher <words>``."""
        number = len(self.running)
        out_file, err_file = self.folder / f"out-{number}", self.folder / f"err-{number}"
        with out_file.open("wb") as out, err_file.open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "launcher", *words],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "COLUMNS": "200"},
                start_new_session=True,  # a terminal's foreground job, to which Ctrl-C goes as a whole
            )
        launched = Launched(
            process=process,
            paths=self.paths(trial),
            out_file=out_file,
            err_file=err_file,
            started=time.monotonic(),
        )
        self.running.append(launched)
        return launched

    def start_run(self, trial: str, *overrides: str) -> Launched:
        return self.start("run", "exp.yaml", "--plain", f"trial_name={trial}", *overrides, trial=trial)

    def call(self, *words: str) -> Ended:
        """Run a command to its end."""
        return self.start(*words).end()

    def run(self, trial: str, *overrides: str) -> RunPaths:
        """A run that must succeed, and leave nothing behind but its folder."""
        launched = self.start_run(trial, *overrides)
        ended = launched.end()
        assert ended.status == 0, ended.err
        assert launched.left() == {}
        return launched.paths

    def close(self) -> None:
        """End what a failed test left running."""
        for launched in self.running:
            if launched.process.poll() is None:
                launched.process.kill()
                launched.process.wait()
            if launched.paths.lock.exists():
                sweep(launched.run_id)


@contextmanager
def open_workspace(folder: Path, model_folder: Path) -> Iterator[Workspace]:
    """``model_folder`` comes from ``launcher.tiny_models``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tasks.py").write_text(TASKS)
    (folder / "long.jsonl").write_text('{"prompt": "<bos>"}\n' * 8)
    workspace = Workspace(folder=folder)
    workspace.experiment.write_text(yaml.safe_dump(_experiment(model_folder), sort_keys=False))
    try:
        yield workspace
    finally:
        workspace.close()


#: answers of many tokens, so that requests are in flight whenever weights change
LONG_ANSWERS = (
    "workflow=workflows.single_turn.SingleTurnWorkflow",
    "workflow_args={}",
    "reward_fn=tasks.even_share",
    "train_dataset.path=long.jsonl",
    "valid_dataset=null",
    "gconfig.max_new_tokens=56",
    "gconfig.ignore_eos=true",
)
#: a run that ends only when it is told to
ENDLESS = ("total_train_steps=100000",)


def _experiment(model_folder: Path) -> dict[str, Any]:
    return {
        "experiment_name": "tiny",
        "trial_name": "cpu",
        "seed": 1,
        "total_train_steps": 6,
        "model": {"path": str(model_folder / "model")},
        "train_dataset": {"path": str(model_folder / "train.jsonl"), "batch_size": 4},
        "valid_dataset": {"path": str(model_folder / "test.jsonl"), "max_prompts": 20},
        "workflow": "workflows.guess.GuessWorkflow",
        "workflow_args": {"turns": 3},
        "reward_fn": "workflows.rewards.guess.hit_secret",
        "gconfig": {"n_samples": 4, "max_new_tokens": 4, "temperature": 1.0},
        "rollout": {"max_concurrent_rollouts": 12, "max_head_offpolicyness": 2},
        "actor": {"optimizer": {"lr": 5e-4}, "ppo_n_minibatches": 2},
    }


def steps_of(paths: RunPaths) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` that report steps."""
    return [line for line in read_metrics(paths.metrics) if "step" in line] if paths.metrics.exists() else []


def evaluations_of(paths: RunPaths) -> list[dict[str, Any]]:
    return [line["evaluation"] for line in read_metrics(paths.metrics) if "evaluation" in line]


def summary_of(paths: RunPaths) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(paths.summary.read_text())
    return found


def rollouts_of(paths: RunPaths) -> dict[int, list[dict[str, Any]]]:
    """The dumped trajectories of every batch."""
    return {
        int(file.stem): [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted(paths.rollouts.glob("*.jsonl"))
    }


def spans_of(paths: RunPaths, track: str) -> list[tuple[float, float, dict[str, Any]]]:
    """(begin, end, arguments) of the spans of one track of the timeline, in microseconds."""
    events = read_trace(paths.trace)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    on_track = {tid for tid, name in names.items() if name == track or name.startswith(f"{track} ")}
    return [(e["ts"], e["ts"] + e["dur"], e.get("args", {})) for e in events if e["ph"] == "X" and e["tid"] in on_track]


def socket_folders(run_id: str) -> list[Path]:
    """Folders of ``ipc://`` sockets, wherever the launcher may have put them."""
    return [p for base in {tempfile.gettempdir(), "/tmp"} for p in Path(base).glob(f"areal-like-{run_id}-*")]


def _processes_of(run_id: str) -> Iterable[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.environ().get("AREAL_LIKE_RUN_ID") == run_id:
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _listening(where: Any = psutil) -> set[tuple[str, int]]:
    """(address, port) of every listening TCP socket of the machine, or of one process, which may have ended."""
    try:
        found = where.net_connections(kind="tcp")
    except psutil.NoSuchProcess:
        return set()
    return {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}
