"""Reward functions: in killable processes, on the event loop, and what their failures look like."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from areal_like.config.rewards import RewardsConfig
from areal_like.errors import ConfigError, InfrastructureError, RewardError
from areal_like.rollout.rewards import InlineReward, RewardPool, open_rewards

Rewards = RewardPool | InlineReward


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def rewards(name: str = "as_told", log_path: Path | None = None, **settings: Any) -> Rewards:
    return open_rewards(f"reward_functions.{name}", RewardsConfig(**settings), log_path=log_path)


async def score(reward_fn: Rewards, completions: str, **data: Any) -> float:
    return await reward_fn("p", completions, [1], [2, 3], **data)


#: processes that earlier tests of the session have left to us (multiprocessing's trackers live as long as we do)
_EARLIER: set[int] = set()


@pytest.fixture(autouse=True)
def only_our_own_children() -> None:
    _EARLIER.clear()
    _EARLIER.update(p.pid for p in psutil.Process().children(recursive=True))


def children() -> list[psutil.Process]:
    """Processes that this test has started and that still live."""
    return [p for p in psutil.Process().children(recursive=True) if p.pid not in _EARLIER]


async def test_many_calls_at_once_get_their_own_rewards_and_no_process_stays() -> None:
    async with rewards("length", workers=2, queue_size=64) as reward_fn:
        lengths = [n % 7 for n in range(1024)]
        assert await asyncio.gather(*(reward_fn("p", "c", [], range(n)) for n in lengths)) == lengths
        while reward_fn.statistics().workers < 2:  # one of them may have done it all before the other was ready
            await reward_fn("p", "c", [], [])
        assert len(children()) == 2
        figures = reward_fn.statistics()
        assert (figures.failures, figures.pending) == (0, 0)
        assert figures.calls >= 1024
    assert children() == []


async def test_the_worker_imports_nothing_heavy_and_gets_the_rows_fields() -> None:
    async with rewards("torch_free") as reward_fn:
        assert await reward_fn("p", "c", [], [], secret=3, anything={"nested": [1]}) == 1.0


@pytest.mark.parametrize("workers", [0, 1])
async def test_a_row_may_be_passed_whole_as_areal_workflows_do(workers: int) -> None:
    row = {"prompt": "12+3=", "completions": "?", "secret": 3, "anything": {"nested": [1]}}
    async with rewards("fields", workers=workers) as reward_fn:
        assert await reward_fn("p", "c", [1], [2], **row) == 1.0


async def test_a_raising_function_is_an_error_with_its_traceback_and_never_a_reward() -> None:
    async with rewards() as reward_fn:
        with pytest.raises(RewardError) as raised:
            await score(reward_fn, "raise")
        first, *rest = str(raised.value).splitlines()
        assert first == "reward function reward_functions.as_told failed: ValueError: the answer has two lines"
        assert any("reward_functions.py" in line for line in rest)
        assert not any("reward_worker.py" in line for line in rest)
        assert await score(reward_fn, "fine") == 1.0
        assert reward_fn.statistics().failures == 1


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("nan", "ValueError: it returned nan, not a finite number"),
        ("none", r"TypeError: it returned None \(NoneType\), not a number"),
        ("text", r"TypeError: it returned '1.0' \(str\), not a number"),
        ("exit", "SystemExit: 3"),
        ("panic", "BaseException: in Rust"),
        ("interrupt", "KeyboardInterrupt"),
        ("unshowable", r"Unshowable: \(its message cannot be shown\)"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
async def test_what_is_no_finite_number_is_an_error(told: str, message: str, workers: int) -> None:
    async with rewards(workers=workers) as reward_fn:
        with pytest.raises(RewardError, match=message):
            await score(reward_fn, told)
        assert await score(reward_fn, "true") == 1.0


async def test_a_hung_call_is_killed_while_those_behind_it_are_run_again() -> None:
    async with rewards(workers=1, timeout=0.3) as reward_fn:
        for _ in range(20):  # so short that calls are sent in batches from here on
            await score(reward_fn, "fine")
        (before,) = children()
        calls = [score(reward_fn, told) for told in ("fine", "hang", "fine", "raise", "fine")]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [results[i] for i in (0, 2, 4)] == [1.0, 1.0, 1.0]
        assert isinstance(results[1], RewardError)
        assert "ran longer than rewards.timeout = 0.3 s" in str(results[1])
        assert "two lines" in str(results[3])
        (after,) = children()
        assert after.pid != before.pid
        figures = reward_fn.statistics()
        assert (figures.timeouts, figures.failures, figures.restarts) == (1, 2, 1)


async def test_killing_a_worker_kills_what_it_started(tmp_path: Path) -> None:
    log = tmp_path / "rewards.log"
    os.mkfifo(log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    async with rewards(timeout=0.5, log_path=log) as reward_fn:
        with pytest.raises(RewardError, match="ran longer"):
            await score(reward_fn, "hang with child")
    os.set_blocking(reader, True)
    with os.fdopen(reader) as output:  # it ends when the last process that could write to it is gone
        assert int(output.read()) > 0


async def test_a_call_whose_worker_was_killed_from_outside_runs_again(tmp_path: Path) -> None:
    async with rewards() as reward_fn:
        assert await score(reward_fn, "die once", note=str(tmp_path / "note")) == 1.0
        assert reward_fn.statistics().restarts == 1


async def test_a_worker_that_died_idle_is_replaced() -> None:
    async with rewards("process_id") as reward_fn:
        pid = int(await score(reward_fn, ""))
        os.kill(pid, signal.SIGKILL)
        assert int(await score(reward_fn, "")) != pid
        assert reward_fn.statistics().failures == 0


async def test_a_call_that_takes_workers_down_is_given_up() -> None:
    async with rewards() as reward_fn:
        results = await asyncio.gather(*(score(reward_fn, told) for told in ("die", "fine")), return_exceptions=True)
        assert "its process died in this call, or wrote to our socket, 2 times in a row" in str(results[0])
        assert results[1] == 1.0


async def test_callers_beyond_the_queue_are_held_back_and_a_cancelled_one_makes_room() -> None:
    async with rewards(workers=1, timeout=0.3, queue_size=2) as reward_fn:
        calls = [asyncio.create_task(score(reward_fn, told)) for told in ("hang", "fine", "fine", "fine")]
        for _ in range(5):
            await asyncio.sleep(0)
        assert reward_fn.statistics().pending == 2
        calls[1].cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(results[0], RewardError)
        assert isinstance(results[1], asyncio.CancelledError)
        assert results[2:] == [1.0, 1.0]
        assert reward_fn.statistics().pending == 0


async def test_closing_ends_waiting_calls_as_infrastructure_and_refuses_later_ones() -> None:
    async with rewards(workers=1) as reward_fn:
        waiting = asyncio.create_task(score(reward_fn, "hang"))
        await asyncio.sleep(0)
    with pytest.raises(InfrastructureError, match="the reward pool is closed"):
        await waiting
    with pytest.raises(InfrastructureError, match="closed"):
        await score(reward_fn, "fine")
    assert children() == []


async def test_an_error_in_the_body_comes_out_as_it_is() -> None:
    with pytest.raises(KeyError):
        async with rewards():
            raise KeyError("body")
    assert children() == []


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "5",
        "garbage",
        "[" * 100_000,
        '{"serial": 1, "reward": 1.0}',
        '{"serial": 1, "reward": "1.0", "seconds": 0.1}',
        '{"serial": 1, "reward": NaN, "seconds": 0.1}',
        '{"serial": 1, "error": null, "seconds": 0.1}',
        '{"serial": 99, "reward": 1.0, "seconds": 0.1}',
    ],
)
async def test_what_user_code_writes_to_the_socket_is_no_answer(line: str) -> None:
    async with rewards(workers=1) as reward_fn:
        with pytest.raises(RewardError, match="wrote to our socket, 2 times in a row"):
            await score(reward_fn, "write", line=line)
        assert await score(reward_fn, "true") == 1.0
        assert reward_fn.statistics().restarts == 2


async def test_a_call_whose_worker_was_written_to_once_is_run_again(tmp_path: Path) -> None:
    async with rewards(workers=1) as reward_fn:
        assert await score(reward_fn, "write once", note=str(tmp_path / "note")) == 1.0
        assert reward_fn.statistics().failures == 0


async def test_a_forked_child_does_not_answer() -> None:
    async with rewards(workers=1) as reward_fn:
        for _ in range(20):
            told = ("fork", "nan", "fork", "true")
            first, second, *rest = await asyncio.gather(*(score(reward_fn, t) for t in told), return_exceptions=True)
            assert (first, rest) == (1.0, [1.0, 1.0])
            assert isinstance(second, RewardError)
        assert reward_fn.statistics().restarts == 0


async def test_output_goes_to_the_log_and_does_not_disturb_answers(tmp_path: Path) -> None:
    log = tmp_path / "rewards.log"
    async with rewards(log_path=log) as reward_fn:
        assert await score(reward_fn, "print") == 0.0
    assert sorted(log.read_text().splitlines()) == ["raw to descriptor 1", "to stdout"]


async def test_arguments_that_cannot_travel_are_an_error_of_the_call() -> None:
    async with rewards() as reward_fn:
        with pytest.raises(RewardError, match="cannot be sent to another process"):
            await score(reward_fn, "fine", unpicklable=lambda: None)
        assert await score(reward_fn, "fine") == 1.0


async def test_a_function_that_workers_cannot_import_is_found_at_the_start() -> None:
    with pytest.raises(ConfigError, match="no worker can start: ModuleNotFoundError"):
        async with RewardPool("no_such_module.score", RewardsConfig(workers=2)):
            pass
    assert children() == []


@pytest.mark.parametrize(
    ("name", "message"),
    [("lenght", "did you mean 'length'?"), ("not_callable", "int, which cannot be called")],
)
def test_a_wrong_name_is_found_before_anything_starts(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        rewards(name)
    assert message in str(raised.value)


@pytest.mark.parametrize(("name", "reward"), [("awaited", 2.0), ("async_object", 3.0)])
async def test_coroutine_functions_run_here(name: str, reward: float) -> None:
    async with rewards(name) as reward_fn:
        assert await score(reward_fn, "fine") == reward
        assert children() == []


async def test_coroutine_functions_obey_the_same_limit_and_fail_the_same_way() -> None:
    async with rewards("awaited", timeout=0.05) as reward_fn:
        with pytest.raises(RewardError, match=r"ran longer than rewards\.timeout = 0\.05 s"):
            await score(reward_fn, "hang")
        with pytest.raises(RewardError, match="failed: ValueError: no such answer"):
            await score(reward_fn, "raise")
        figures = reward_fn.statistics()
        assert (figures.calls, figures.failures, figures.timeouts, figures.pending) == (2, 2, 1, 0)


async def test_no_workers_runs_plain_functions_here() -> None:
    async with rewards("process_id", workers=0) as reward_fn:
        assert await score(reward_fn, "") == os.getpid()


def test_the_pool_works_on_uvloop_too() -> None:
    async def main() -> list[float | BaseException]:
        async with rewards(workers=1, timeout=0.3) as reward_fn:
            calls = [score(reward_fn, told) for told in ("fine", "hang", "fine")]
            return await asyncio.gather(*calls, return_exceptions=True)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        first, second, third = runner.run(main())
    assert (first, third) == (1.0, 1.0)
    assert isinstance(second, RewardError)


_CONTROLLER = """
import asyncio
from areal_like.config.rewards import RewardsConfig
from areal_like.rollout.rewards import open_rewards

async def main():
    async with open_rewards("reward_functions.as_told", RewardsConfig(workers=1)) as reward_fn:
        await reward_fn("", "hang with child", [], [])

asyncio.run(main())
"""


def test_a_busy_worker_dies_with_a_killed_controller() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", _CONTROLLER]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as controller:
        assert controller.stderr is not None
        sleeper = psutil.Process(int(controller.stderr.readline()))
        worker = sleeper.parent()
        assert worker is not None
        controller.kill()
    gone, alive = psutil.wait_procs([worker], timeout=5)
    sleeper.kill()  # what user code started is out of reach once nobody is left to kill it
    assert (gone, alive) == ([worker], [])


def test_worker_answers_are_json_lines() -> None:
    from areal_like.rollout.reward_worker import answer

    message = json.loads(json.dumps(answer(len, b"not a pickle")))
    assert message["error"].startswith("UnpicklingError")
    assert message["seconds"] >= 0
