"""Processes that the benchmarks start: each leads a group of its own, and is gone with it afterwards."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.demo_runs import ROOT
from launcher.local import tail

#: the variable that carries a server's bearer token
TOKEN_VARIABLE = "AREAL_LIKE_TOKEN"
#: seconds that something which was asked to end gets
GRACE = 15.0


@contextmanager
def process_group(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, **pipes: Any
) -> Iterator[subprocess.Popen[str]]:
    """A process whose output goes to ``log``, unless ``pipes`` say otherwise; its group is gone afterwards."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            list(command), cwd=ROOT, text=True, start_new_session=True, env={**os.environ, **(environment or {})},
            **{"stdout": output, "stderr": output, **pipes},
        )  # fmt: skip
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)


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
