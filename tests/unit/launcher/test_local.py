"""Children on this host, as real processes: started, watched, stopped, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from areal_like.config.paths import RunPaths
from areal_like.errors import ProcessDied
from areal_like.weights.segments import list_segments, segment_name, segment_path
from launcher.leftovers import new_run_id
from launcher.local import LocalLauncher, tail

#: a child that says it is ready and waits; ends on SIGTERM
WAITS = "import signal, sys; print('ready', flush=True); signal.pause()"
#: a child that ignores SIGTERM
IGNORES = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('ready', flush=True)
while True:
    signal.pause()
"""
#: a child with a child of its own, whose id it prints
NESTED = """
import signal, subprocess
print('ready', subprocess.Popen(['sleep', '600']).pid, flush=True)
signal.pause()
"""
#: a child as roles start: bound to its parent's life
BOUND = """
import signal
from launcher.child import die_with_parent, run_token
die_with_parent()
print(run_token(), flush=True)
signal.pause()
"""


def launcher_of(tmp_path: Path, code: str, **settings: float) -> LocalLauncher:
    return LocalLauncher(
        paths=RunPaths(root=tmp_path / "trial"),
        run_id=new_run_id(),
        token="secret",
        command=(sys.executable, "-c", code),
        **settings,
    )


async def until(condition: Callable[[], object], timeout: float = 10.0) -> None:
    """Wait for another process to have done something that sends no event to us."""
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 (another process sends no event)
            await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_a_child_gets_its_role_spec_token_and_threads(tmp_path: Path) -> None:
    code = """
    import os, stat, sys
    role, spec = sys.argv[1:]
    print(role, open(spec).read(), oct(stat.S_IMODE(os.stat(spec).st_mode)), os.getsid(0) == os.getpid())
    print(os.environ["AREAL_LIKE_TOKEN"], os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"], os.environ["X"])
    print("secret" in " ".join(sys.argv), file=sys.stderr)
    """
    async with launcher_of(tmp_path, textwrap.dedent(code)) as launcher:
        child = await launcher.start("train", 1, '{"rank": 1}', threads=3, environment={"X": "y"})
        with pytest.raises(ProcessDied):
            await asyncio.wait_for(launcher.watch(), 10)
    assert child.name == "train-1"
    assert child.log == tmp_path / "trial" / "logs" / "train-1.log"
    assert child.log.read_text().splitlines() == [
        'train {"rank": 1} 0o600 True',
        "secret 3 3 y",
        "False",
    ]


async def test_a_death_names_the_process_how_it_ended_and_its_last_lines(tmp_path: Path) -> None:
    code = "import sys\nfor i in range(100): print('line', i, flush=True)\nsys.exit('no memory left')"
    async with launcher_of(tmp_path, code) as launcher:
        await launcher.start("inference", 0, "{}", threads=1)
        with pytest.raises(ProcessDied, match=r"inference-0 \(pid \d+\) ended with exit code 1") as caught:
            await asyncio.wait_for(launcher.watch(), 10)
    assert "  | no memory left" in str(caught.value)
    assert "line 99" in str(caught.value)
    assert "line 50" not in str(caught.value)


async def test_a_child_that_returns_although_needed_is_an_error_too(tmp_path: Path) -> None:
    async with launcher_of(tmp_path, "pass") as launcher:
        await launcher.start("train", 0, "{}", threads=1)
        with pytest.raises(ProcessDied, match="exit code 0 although the run still needed it"):
            await asyncio.wait_for(launcher.watch(), 10)


async def test_a_killed_child_is_named_with_its_signal(tmp_path: Path) -> None:
    async with launcher_of(tmp_path, WAITS) as launcher:
        child = await launcher.start("train", 0, "{}", threads=1)
        await until(lambda: tail(child.log, 1))
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(ProcessDied, match="SIGKILL"):
            await asyncio.wait_for(launcher.watch(), 10)


async def test_stopping_ends_every_child_and_is_no_death(tmp_path: Path) -> None:
    async with launcher_of(tmp_path, WAITS) as launcher:
        children = [await launcher.start("train", i, "{}", threads=1) for i in range(2)]
        for child in children:
            await until(lambda log=child.log: tail(log, 1))
        assert launcher.statistics().running == 2
        await launcher.stop()
        await launcher.stop()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(launcher.watch(), 0.01)
        with pytest.raises(ProcessDied, match="being stopped"):
            await launcher.start("train", 2, "{}", threads=1)
    assert all(gone(child.pid) for child in children)
    assert launcher.statistics().running == 0
    assert launcher.statistics().killed == 0


async def test_a_child_that_ignores_the_request_is_killed_within_the_grace(tmp_path: Path) -> None:
    launcher = launcher_of(tmp_path, IGNORES, term_grace=0.2, kill_grace=5.0)
    async with launcher:
        child = await launcher.start("train", 0, "{}", threads=1)
        await until(lambda: tail(child.log, 1))
        began = time.monotonic()
    assert time.monotonic() - began < 2.0
    assert gone(child.pid)
    assert launcher.statistics().killed == 1


@pytest.mark.parametrize("how", ["stop", "death"])
async def test_a_childs_own_children_end_with_it(tmp_path: Path, how: str) -> None:
    async with launcher_of(tmp_path, NESTED) as launcher:
        child = await launcher.start("inference", 0, "{}", threads=1)
        await until(lambda: tail(child.log, 1))
        grandchild = int(tail(child.log, 1)[0].split()[1])
        if how == "death":
            os.kill(child.pid, signal.SIGKILL)
            with pytest.raises(ProcessDied):
                await asyncio.wait_for(launcher.watch(), 10)
    await until(lambda: gone(grandchild))


async def test_sockets_and_shared_memory_of_the_run_are_removed_and_of_others_kept(tmp_path: Path) -> None:
    other = segment_path(segment_name(new_run_id(), "weights"))
    other.touch()
    try:
        async with launcher_of(tmp_path, WAITS) as launcher:
            segment_path(segment_name(launcher.run_id, "weights-0")).touch()
            (launcher.socket_folder / "controller.sock").touch()
            assert oct(launcher.socket_folder.stat().st_mode & 0o777) == "0o700"
            assert len(str(launcher.socket_folder)) <= 70
        assert list_segments(launcher.run_id) == ()
        assert not launcher.socket_folder.exists()
        assert other.exists()
    finally:
        other.unlink()


async def test_cancelling_the_stop_still_ends_the_children(tmp_path: Path) -> None:
    launcher = launcher_of(tmp_path, IGNORES, term_grace=60.0)
    child = await launcher.start("train", 0, "{}", threads=1)
    await until(lambda: tail(child.log, 1))
    stopping = asyncio.create_task(launcher.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await until(lambda: gone(child.pid))
    await launcher.stop()


async def test_an_interpreter_that_is_missing_is_named(tmp_path: Path) -> None:
    launcher = LocalLauncher(
        paths=RunPaths(root=tmp_path), run_id=new_run_id(), token="t", command=("/nowhere/python", "-m", "roles")
    )
    async with launcher:
        with pytest.raises(ProcessDied, match="/nowhere/python could not be started: No such file"):
            await launcher.start("train", 0, "{}", threads=1)


@pytest.mark.parametrize("runner", ["asyncio", "uvloop"])
def test_no_child_outlives_a_killed_controller(tmp_path: Path, runner: str) -> None:
    controller_code = f"""
    import asyncio, sys, uvloop
    from pathlib import Path
    from areal_like.config.paths import RunPaths
    from launcher.local import LocalLauncher, tail
    async def main():
        launcher = LocalLauncher(paths=RunPaths(root=Path({str(tmp_path)!r})), run_id="feedbeef", token="secret",
                                 command=(sys.executable, "-c", {BOUND!r}))
        child = await launcher.start("train", 0, "{{}}", threads=1)
        while not tail(child.log, 1):
            await asyncio.sleep(0.01)
        print(child.pid, *tail(child.log, 1), flush=True)
        await launcher.watch()
    {runner}.run(main())
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(controller_code)], stdout=subprocess.PIPE
    ) as controller:
        assert controller.stdout is not None
        pid, *rest = controller.stdout.readline().decode().split()
        assert rest == ["secret"]
        controller.kill()
    deadline = time.monotonic() + 5
    while not gone(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone(int(pid))


def test_a_child_whose_parent_is_already_gone_ends_at_once() -> None:
    code = "from launcher.child import die_with_parent; die_with_parent(); print('alive')"
    ended = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "AREAL_LIKE_PARENT_PID": "1"}, capture_output=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (137, b"")


def test_the_tail_of_a_log_is_its_last_lines_whatever_its_bytes(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert tail(log, 3) == []
    log.write_bytes(b"a" * 100_000 + b"\n\xff\xfe\nlast\n")
    assert tail(log, 2) == ["��", "last"]
