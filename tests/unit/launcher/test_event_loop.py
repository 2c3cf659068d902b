"""How the process of a run ends: by itself, asked to, or by force. Each in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

from areal_like.errors import BreakerTripped
from areal_like.weights.segments import list_segments, segment_name, segment_path
from launcher.event_loop import run_to_end
from launcher.leftovers import make_socket_folder, new_run_id

#: the parts of a main coroutine, by name
PROGRAM = """
import asyncio, subprocess, sys, threading, time
from launcher import event_loop

event_loop.FORCE_AFTER, event_loop.FORCE_AFTER_REPEATED, event_loop._TASKS_GRACE = 1.0, 0.2, 0.2
event_loop._UNWIND_GRACE = 2.0
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])

def say():
    print(child.pid, flush=True)

async def follows(stop):
    say()
    await stop.wait()
    child.kill()

async def interrupted(stop):
    await follows(stop)
    raise event_loop.Interrupted("asked to end")

async def blocks(stop):
    say()
    time.sleep(1000)

async def refuses(stop):
    async def deaf():
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass
    task = asyncio.create_task(deaf())
    await asyncio.sleep(0)
    await follows(stop)

async def waits_for_a_thread(stop):
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 1000)
    await follows(stop)

async def only_closes(stop):
    say()
    stop.work_ended = True
    await asyncio.sleep(1000)

async def breaks(error):
    raise error

async def is_broken(stop, error, again=None, deaf=False):
    tasks = [asyncio.create_task(breaks(error))]
    say()
    try:
        await asyncio.sleep(1000)
    finally:
        tasks.append(asyncio.create_task(breaks(again or ValueError("no matter"))))
        await asyncio.sleep(1000 if deaf else 0.1)
        print("in order", flush=True)

async def interrupts(stop):
    await is_broken(stop, KeyboardInterrupt())

async def exits(stop):
    await is_broken(stop, SystemExit(0))

async def interrupts_again(stop):
    await is_broken(stop, KeyboardInterrupt(), SystemExit(0))

async def interrupts_and_stays(stop):
    await is_broken(stop, KeyboardInterrupt(), SystemExit(0), deaf=True)

sys.exit(event_loop.run_to_end(globals()[sys.argv[1]], run_id=sys.argv[2]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("main", "forced"),
    [("follows", False), ("interrupted", False), ("refuses", False), ("blocks", True), ("waits_for_a_thread", True)],
)
def test_a_signal_ends_it_whatever_it_does(main: str, forced: bool, number: signal.Signals) -> None:
    run_id = new_run_id()
    segment = segment_path(segment_name(run_id, "left"))
    command = [sys.executable, "-c", PROGRAM, main, run_id]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        segment.touch()
        sockets = make_socket_folder(run_id)
        process.send_signal(number)
        began = time.monotonic()
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert (f"{number.name} was not followed in time" in errors) is forced
    if forced:
        assert time.monotonic() - began > 0.9
        assert not child.is_running()
        assert list_segments(run_id) == ()
        assert not sockets.exists()
    else:  # in order: what the run holds is its own to remove
        segment.unlink()
        sockets.rmdir()


@pytest.mark.parametrize(
    ("main", "ordered"),
    [("interrupts", True), ("exits", True), ("interrupts_again", True), ("interrupts_and_stays", False)],
)
def test_user_code_that_breaks_out_of_the_loop_leaves_nothing(main: str, ordered: bool) -> None:
    run_id = new_run_id()
    segment, sockets = segment_path(segment_name(run_id, "left")), make_socket_folder(run_id)
    segment.touch()
    command = [sys.executable, "-c", PROGRAM, main, run_id]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    pid, *told = ended.stdout.splitlines()
    assert ended.returncode == 1
    assert "in a task of its own, which ends the event loop" in ended.stderr
    assert told == ["in order"] * ordered
    assert not psutil.pid_exists(int(pid))
    assert list_segments(run_id) == ()
    assert not sockets.exists()


def test_slow_processes_of_a_run_that_is_over_are_no_fault_of_the_users_code() -> None:
    command = [sys.executable, "-c", PROGRAM, "only_closes", new_run_id()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == (
        "areal-like: SIGINT: the run had ended; processes that were still busy were killed, and nothing is lost\n"
    )
    assert not child.is_running()


def test_a_repeated_signal_is_followed_sooner() -> None:
    command = [sys.executable, "-c", PROGRAM.replace("= 1.0, 0.2", "= 500.0, 0.2"), "blocks", new_run_id()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode in (130, 143)  # whichever was heard last


def test_what_it_raises_is_told_without_the_groups_around_it() -> None:
    async def fails(stop: object) -> None:
        raise ExceptionGroup("rollouts", [ExceptionGroup("siblings", [BreakerTripped("32 in a row")])])

    async def ends(stop: object) -> None:
        return None

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(BreakerTripped, match="32 in a row"):
        run_to_end(fails, run_id="none")
    assert run_to_end(ends, run_id="none") == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
