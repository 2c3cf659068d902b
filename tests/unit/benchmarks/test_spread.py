"""Jobs over places: how many each gets, how many run at once, and what one that fails ends."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.gpu.spread import spread


@pytest.mark.parametrize(("jobs", "places"), [(1, 1), (5, 2), (18, 4), (3, 4), (8, 4)])
def test_all_run_at_once_and_places_differ_by_one_job_at_most(jobs: int, places: int) -> None:
    together = threading.Barrier(jobs, timeout=10)

    def work(job: int, place: str) -> str:
        together.wait()  # broken unless all of them are there
        return place

    found = spread(range(jobs), [f"gpu {i}" for i in range(places)], work)
    assert list(found) == list(range(jobs))
    assert list(found.values()) == [f"gpu {i % places}" for i in range(jobs)]


def test_no_place_has_more_than_its_most_and_who_has_room_takes_the_next() -> None:
    lock, here, highest, served = threading.Lock(), Counter[str](), Counter[str](), Counter[str]()
    long_over = threading.Event()

    def work(job: int, place: str) -> int:
        with lock:
            here[place] += 1
            served[place] += 1
            highest[place] = max(highest[place], here[place])
        if job in (0, 2):  # both of gpu 0's first ones last until all the others are over
            assert long_over.wait(10)
        with lock:
            here[place] -= 1
            if sum(served.values()) == 10 and not here["gpu 1"]:
                long_over.set()
        return job * job

    found = spread(range(10), ["gpu 0", "gpu 1"], work, most=2)
    assert found == {job: job * job for job in range(10)}
    assert highest["gpu 0"] == 2 >= highest["gpu 1"]
    assert served == {"gpu 0": 2, "gpu 1": 8}


def test_what_there_is_is_told_in_the_order_of_the_jobs() -> None:
    told: list[list[str]] = []
    first = threading.Event()

    def work(job: str, place: None) -> str:
        if job == "a":
            assert first.wait(10)
        return job.upper()

    def listen(found: dict[str, str]) -> None:
        told.append(list(found))
        if "b" in found:
            first.set()

    spread(["a", "b"], [None], work, told=listen)
    assert told == [["b"], ["a", "b"]]


def test_a_job_that_raises_ends_it_and_those_that_wait_do_not_begin() -> None:
    begun = []

    def work(job: int, place: None) -> None:
        begun.append(job)
        raise ValueError(f"job {job}")

    with pytest.raises(ValueError, match="job 0"):
        spread(range(3), [None], work, most=1)
    assert begun == [0]


def test_no_job_is_no_work() -> None:
    assert spread([], ["gpu 0"], lambda job, place: place) == {}
