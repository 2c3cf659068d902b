"""The engine's thread: orders between two tokens, and what happens when a step fails. Every wait is on an event."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from areal_like.api.weights import InterruptMode
from areal_like.errors import InfrastructureError, ServerUnavailable, WeightUpdateError
from areal_like.inference.embedded.engine import DecodeEngine
from areal_like.inference.embedded.requests import Request

SECONDS = 20.0


class Watched:
    """An engine whose loop announces its steps and waits for permission before each one."""

    def __init__(self, loop: Any) -> None:
        self.finished: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self.failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.permits = threading.Semaphore(0)
        self.stepped: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.free = False
        plain_step = loop.step

        def step(version: int, *, admit: bool) -> None:
            if not self.free:
                assert self.permits.acquire(timeout=SECONDS)
            plain_step(version, admit=admit)
            self.stepped.put(version)

        loop.step = step
        self.loop = loop
        self.engine = DecodeEngine(loop, deliver=self._deliver, failed=self.failures.put)

    def _deliver(self, finished: list[Request]) -> None:
        for request in finished:
            self.finished.put(request)

    def steps(self, count: int) -> None:
        """Let exactly ``count`` steps happen, and return after the last."""
        for _ in range(count):
            self.permits.release()
            self.stepped.get(timeout=SECONDS)

    def run_free(self) -> None:
        self.free = True
        self.permits.release()


@contextmanager
def watched(loop: Any) -> Iterator[Watched]:
    watch = Watched(loop)
    with watch.engine:
        try:
            yield watch
        finally:
            watch.run_free()


def result(future: Future[Any]) -> Any:
    return future.result(SECONDS)


def spans(request: Request) -> list[tuple[int, int, int]]:
    return [(s["version"], s["start"], s["end"]) for s in request.answers[0].output()["spans"]]


def test_requests_come_back_as_they_end(make: Any, make_loop: Any) -> None:
    with watched(make_loop()) as at:
        at.run_free()
        requests = [make([3, 4], max_new_tokens=n) for n in (5, 1, 3)]
        for request in requests:
            at.engine.submit(request)
        got = {at.finished.get(timeout=SECONDS) for _ in requests}
    assert got == set(requests)


def test_keep_swaps_between_two_tokens_and_the_spans_say_where(make: Any, make_loop: Any) -> None:
    with watched(make_loop()) as at:
        request = make([3, 4], max_new_tokens=9)
        at.engine.submit(request)
        at.steps(3)
        applied: list[int] = []
        order = at.engine.commit(7, InterruptMode.KEEP, lambda: applied.append(len(request.answers[0].tokens)))
        at.run_free()
        committed = result(order)
        at.finished.get(timeout=SECONDS)
    # the thread may have been about to take its fourth step when the order came
    (swapped,) = applied
    assert swapped in (4, 5)
    assert spans(request) == [(0, 0, swapped), (7, swapped, 9)]
    assert (committed.version, committed.interrupted_requests) == (7, 1)
    assert committed.seconds_paused >= 0


def test_recompute_renews_every_running_prefix(make: Any, make_loop: Any) -> None:
    with watched(make_loop()) as at:
        requests = [make([3, 4, 5], max_new_tokens=9), make([6], max_new_tokens=9)]
        for request in requests:
            at.engine.submit(request)
        at.steps(4)
        at.engine.pause(InterruptMode.KEEP)
        at.run_free()
        result(at.engine.commit(1, InterruptMode.RECOMPUTE, lambda: None))
        held = sum(len(r.prompt) + len(r.answers[0].tokens) - 1 for r in requests)
        assert at.engine.statistics().recomputed_tokens == held
        assert result(at.engine.resume()).in_flight == 2


def test_drain_waits_for_running_answers_and_queues_new_ones(make: Any, make_loop: Any) -> None:
    with watched(make_loop()) as at:
        running = make([3, 4], max_new_tokens=6)
        at.engine.submit(running)
        at.steps(2)
        order = at.engine.commit(1, InterruptMode.DRAIN, lambda: None)
        late = make([5], max_new_tokens=4)
        at.engine.submit(late)
        at.run_free()
        committed = result(order)
        for _ in range(2):
            at.finished.get(timeout=SECONDS)
    assert committed.interrupted_requests == 0
    assert spans(running) == [(0, 0, 6)]
    assert spans(late) == [(1, 0, 4)]


def test_a_withdrawn_drain_lets_prompts_join_again(make: Any, make_loop: Any) -> None:
    with watched(make_loop()) as at:
        at.engine.submit(make([3], max_new_tokens=20))
        at.steps(2)
        order = at.engine.commit(1, InterruptMode.DRAIN, lambda: pytest.fail("withdrawn"))
        late = make([5], max_new_tokens=2)
        at.engine.submit(late)
        at.steps(2)
        assert order.cancel()
        at.run_free()
        assert at.finished.get(timeout=SECONDS) is late
    assert spans(late) == [(0, 0, 2)]


def test_pause_freezes_and_resume_goes_on_and_both_may_repeat(make: Any, make_loop: Any) -> None:
    with watched(make_loop()) as at:
        request = make([3], max_new_tokens=8)
        at.engine.submit(request)
        at.steps(3)
        first = at.engine.pause(InterruptMode.KEEP)
        at.run_free()
        assert result(first).paused
        frozen = len(request.answers[0].tokens)
        state = result(at.engine.pause(InterruptMode.KEEP))
        assert (state.paused, state.in_flight) == (True, 1)
        queued = make([4], max_new_tokens=1)
        at.engine.submit(queued)
        assert result(at.engine.abort(lambda r: r.rid == "nobody")) == 0
        assert len(request.answers[0].tokens) == frozen < 8
        assert at.engine.statistics().queued == 1
        assert not result(at.engine.resume()).paused
        assert not result(at.engine.resume()).paused
        assert {at.finished.get(timeout=SECONDS) for _ in range(2)} == {request, queued}
    assert at.engine.statistics().pause_seconds > 0


def test_a_draining_pause_answers_once_nothing_runs(make: Any, make_loop: Any) -> None:
    with watched(make_loop()) as at:
        at.engine.submit(make([3], max_new_tokens=5))
        at.steps(2)
        order = at.engine.pause(InterruptMode.DRAIN)
        at.steps(1)
        assert not order.done()
        at.run_free()
        state = result(order)
        assert (state.paused, state.in_flight) == (True, 0)


def test_a_resume_answers_a_draining_pause_with_the_truth(make: Any, make_loop: Any) -> None:
    with watched(make_loop()) as at:
        at.engine.submit(make([3], max_new_tokens=50))
        at.steps(2)
        drained = at.engine.pause(InterruptMode.DRAIN)
        resumed = at.engine.resume()
        at.steps(2)
        assert not result(resumed).paused
        state = result(drained)
        assert (state.paused, state.in_flight) == (False, 1)


def test_a_commit_leaves_an_explicit_pause_as_it_was(make: Any, make_loop: Any) -> None:
    with watched(make_loop()) as at:
        result(at.engine.pause(InterruptMode.KEEP))
        result(at.engine.commit(1, InterruptMode.KEEP, lambda: None))
        assert at.engine.statistics().paused
        assert at.engine.version == 1


def test_an_update_that_applied_nothing_is_the_callers_error_only(make: Any, make_loop: Any) -> None:
    def refuse() -> None:
        raise WeightUpdateError("nothing is staged")

    with watched(make_loop()) as at:
        at.run_free()
        for mode in InterruptMode:
            with pytest.raises(WeightUpdateError, match="nothing is staged"):
                result(at.engine.commit(1, mode, refuse))
        assert at.engine.version == 0
        at.engine.submit(make([3], max_new_tokens=2))
        assert spans(at.finished.get(timeout=SECONDS)) == [(0, 0, 2)]


def test_a_half_applied_update_fails_the_engine(make: Any, make_loop: Any) -> None:
    def break_down() -> None:
        raise RuntimeError("copied half of it")

    with watched(make_loop()) as at:
        with pytest.raises(InfrastructureError, match="copied half of it"):
            result(at.engine.commit(1, InterruptMode.KEEP, break_down))
        assert "copied half of it" in at.failures.get(timeout=SECONDS)


def test_a_failing_step_fails_loudly(make: Any, make_loop: Any) -> None:
    with watched(make_loop(max_rows=1)) as at:
        requests = [make([3], max_new_tokens=9), make([4], max_new_tokens=9)]
        for request in requests:
            at.engine.submit(request)
        at.steps(2)

        def explode(*_: object) -> None:
            raise RuntimeError("kernel panic")

        at.loop._runner.decode = explode
        waiting = at.engine.pause(InterruptMode.DRAIN)
        at.run_free()
        assert "RuntimeError: kernel panic" in at.failures.get(timeout=SECONDS)
        assert {at.finished.get(timeout=SECONDS) for _ in range(2)} == set(requests)
        assert all("kernel panic" in r.error for r in requests)
        with pytest.raises(InfrastructureError, match="kernel panic"):
            result(waiting)
        with pytest.raises(InfrastructureError, match="kernel panic"):
            at.engine.submit(make([3]))


def test_closing_ends_what_is_left(make: Any, make_loop: Any) -> None:
    request = make([3], max_new_tokens=50)
    with watched(make_loop()) as at:
        at.engine.pause(InterruptMode.KEEP)
        at.engine.submit(request)
        result(at.engine.pause(InterruptMode.KEEP))
    assert at.finished.get(timeout=SECONDS) is request
    assert "closed" in request.error
    with pytest.raises(ServerUnavailable):
        at.engine.submit(request)
