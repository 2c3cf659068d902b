"""Whatever ends a benchmark ends what it started, and by a signal its temporary folder goes, too."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.demo_runs import ROOT, bound
from benchmarks.gpu.child_processes import Ended, Groups, process_group

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="death signals are Linux's")

_HEAD = """
import subprocess, sys, tempfile
from pathlib import Path
sys.path[:0] = [sys.argv[1] + "/benchmarks", sys.argv[1]]
SLEEPER = [sys.executable, "-I", "-S", "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]
"""
#: how benchmarks run things: in groups, beside each other in threads and from the main thread; a demo; a server
_GROUPS = """
from benchmarks.gpu.child_processes import process_group
from benchmarks.gpu.live_runs import limit_time
from benchmarks.gpu.spread import spread
limit_time(60.0)
def work(job, place):
    with process_group(SLEEPER, Path(folder) / "log", stdout=sys.stdout) as process:
        process.wait()
with tempfile.TemporaryDirectory() as folder:
    print(folder, flush=True)
    spread([1, 2], ["here"], work) if sys.argv[2] == "beside" else work(1, "here")
"""
_DEMO = r"""
from benchmarks import demo_runs
demo_runs.leave_on_signals()
demo_runs.subprocess.DEVNULL = None  # what it starts may be heard
with tempfile.TemporaryDirectory() as folder:
    print(folder, flush=True)
    # in a shell's background, too
    heard = "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    tidy = "try: exec(sys.argv[1])\nexcept KeyboardInterrupt: print('tidy')"
    demo_runs._run_in_order([*SLEEPER[:-1], heard + tidy, SLEEPER[-1]])
"""
_SERVER = """
import sync_servers
sync_servers.end_at(60.0, lambda: None)
sync_servers._PLAY = sync_servers._PLAY[: sync_servers._PLAY.index("from areal_like")] + SLEEPER[-1]
sync_servers.subprocess.DEVNULL = None
with tempfile.TemporaryDirectory() as folder:
    print(folder, flush=True)
    spec = sync_servers.server_spec("embedded", Path(folder), "s0")
    popen = subprocess.Popen
    sync_servers.subprocess.Popen = lambda *words, **more: popen(*words, **more | {"stdout": sys.stdout})
    with sync_servers.running("embedded", spec, Path(folder), timeout=60.0):
        pass
"""
WAYS = {"alone": (_GROUPS, 1), "beside": (_GROUPS, 2), "demo": (_DEMO, 1), "server": (_SERVER, 1)}


def wait_for_end(process: int) -> None:
    """Of a process that is not our child."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], 20.0)[0], f"{process} still runs"
    finally:
        os.close(handle)


@pytest.mark.parametrize(
    ("way", "number"),
    [
        *(("alone", number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)),
        *((way, number) for way in ("beside", "demo", "server") for number in (signal.SIGTERM, signal.SIGKILL)),
    ],
)
def test_what_a_benchmark_started_ends_with_it(way: str, number: signal.Signals, tmp_path: Path) -> None:
    code, count = WAYS[way]
    benchmark = subprocess.Popen(
        [sys.executable, "-c", _HEAD + code, str(ROOT), way],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    with benchmark:
        assert benchmark.stdout is not None
        folder = Path(benchmark.stdout.readline().strip())
        started = [int(benchmark.stdout.readline()) for _ in range(count)]
        assert folder.is_dir()
        benchmark.send_signal(number)
        status = benchmark.wait(20.0)
        for process in started:
            wait_for_end(process)
        said = benchmark.stdout.read()
    if number == signal.SIGKILL:  # nothing is left to take the folder away
        assert status == -number
    else:
        assert (status, folder.exists()) == (128 + number, False)
        assert said == ("tidy\n" if way == "demo" else "")  # a run takes away what it had half built


def test_a_bound_process_is_the_command_itself() -> None:
    """Its id, environment and status are the command's, and what cannot be run is told."""
    code = "import os, sys; print(os.getpid(), os.environ.get('AREAL_LIKE_PARENT_PID')); sys.exit(7)"
    with subprocess.Popen(bound([sys.executable, "-c", code]), stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate()
    assert said.split() == [str(process.pid), "None"]
    assert process.returncode == 7
    lost = subprocess.run(bound(["no/such/program"]), capture_output=True, text=True, check=False)
    assert (lost.returncode, lost.stderr) == (1, "no/such/program: No such file or directory\n")


def test_nothing_is_started_any_more_while_all_ends() -> None:
    groups = Groups()
    groups.end()
    with pytest.raises(Ended):
        groups.begin(lambda: pytest.fail("it was started"))


def test_a_group_that_is_gone_is_not_asked_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be another's by then."""
    groups = Groups()
    monkeypatch.setattr("benchmarks.gpu.child_processes.GROUPS", groups)
    with process_group([sys.executable, "-I", "-S", "-c", ""], tmp_path / "log") as process:
        process.wait()
    asked: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: asked.append(group))
    groups.end()
    assert asked == []
