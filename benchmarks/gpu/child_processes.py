"""Processes that the benchmarks start: each leads a group of its own, and is gone with it afterwards.

Whatever ends the benchmark ends them: a signal by :func:`end_on_signals`, its death by ``demo_runs.bound``.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.demo_runs import ROOT, bound
from launcher.local import tail

#: the variable that carries a server's bearer token
TOKEN_VARIABLE = "AREAL_LIKE_TOKEN"
#: seconds that something which was asked to end gets
GRACE = 15.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(RuntimeError):
    """The benchmark is ending: nothing is started any more."""


class Groups:
    """The process groups of this process, which may be waited for in several threads."""

    def __init__(self) -> None:
        self._leaders: set[int] = set()
        self._lock = threading.RLock()  # a signal's handler may run in the middle of what holds it
        self.ending = False

    def begin(self, start: Callable[[], subprocess.Popen[str]]) -> subprocess.Popen[str]:
        """Start one.

        Raises:
            Ended: all of them are ending.
        """
        with self._lock:
            if self.ending:
                raise Ended("the benchmark is ending")
            process = start()
            self._leaders.add(process.pid)
            return process

    def forget(self, process: subprocess.Popen[str]) -> None:
        """It is gone."""
        with self._lock:
            self._leaders.discard(process.pid)

    def end(self) -> None:
        """Ask all to end, and start none any more; who waits for one sees to its end."""
        with self._lock:
            self.ending = True
            for leader in tuple(self._leaders):
                with suppress(ProcessLookupError):
                    os.killpg(leader, signal.SIGTERM)


GROUPS = Groups()


def end_on_signals() -> None:
    """On SIGINT, SIGTERM and SIGHUP: all groups end, and the main thread leaves by way of every ``finally``.

    The exit status is 128 and the signal's number; later signals find us cleaning up, and do not break that off.
    """

    def over(number: int, frame: object) -> None:
        for each in _ENDING:
            signal.signal(each, signal.SIG_IGN)
        GROUPS.end()
        raise SystemExit(128 + number)

    for number in _ENDING:
        signal.signal(number, over)


@contextmanager
def process_group(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, **pipes: Any
) -> Iterator[subprocess.Popen[str]]:
    """A process whose output goes to ``log``, unless ``pipes`` say otherwise; its group is gone afterwards.

    It gets SIGTERM when this process, or the thread that calls this, dies.

    Raises:
        Ended: the benchmark is ending.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = GROUPS.begin(
            lambda: subprocess.Popen(
                bound(command), cwd=ROOT, text=True, start_new_session=True,
                env={**os.environ, **(environment or {})}, **{"stdout": output, "stderr": output, **pipes},
            )
        )  # fmt: skip
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        GROUPS.forget(process)


class Client:
    """A process that takes work as lines of JSON and answers each with a line ``@`` and JSON. A context manager.

    It says ``@ready`` once it has imported what it needs; whatever else it says goes nowhere, errors to ``log``.
    """

    #: seconds until it must be ready, and for one answer
    IMPORT, TURN = 180.0, 180.0

    def __init__(self, command: Sequence[str], token: str, log: Path) -> None:
        self._command, self._log = command, log
        self._environment = {"OPENAI_API_KEY": token, TOKEN_VARIABLE: token, "HF_HUB_OFFLINE": "1"}
        self._answers: queue.Queue[str | None] = queue.Queue()

    def __enter__(self) -> Self:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._group = process_group(self._command, self._log, self._environment, **pipes)
        self._process = self._group.__enter__()
        self._reader = threading.Thread(target=self._read_for_ever, name="client-answers", daemon=True)
        self._reader.start()
        try:
            if (said := self._answer(self.IMPORT)) != "ready":
                raise RuntimeError(f"a client said {said!r} instead of being ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._group.__exit__(None, None, None)
        self._reader.join(GRACE)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()

    def ask(self, work: Any) -> dict[str, Any]:
        """One turn.

        Raises:
            RuntimeError: it failed, ended, or did not answer in time.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which the answer tells
            self._process.stdin.write(json.dumps(work) + "\n")
            self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._answer(self.TURN))
        if "error" in found:
            raise RuntimeError(str(found["error"]))
        return found

    def _answer(self, timeout: float) -> str:
        with suppress(queue.Empty):
            if (found := self._answers.get(timeout=timeout)) is not None:
                return found
        raise RuntimeError(f"a client ended or said nothing in {timeout:.0f} s:\n" + "\n".join(tail(self._log, 20)))

    def _read_for_ever(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                self._answers.put(line[1:].strip())
        self._answers.put(None)
