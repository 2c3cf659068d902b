"""Jobs at once, spread over places such as GPUs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

Job = TypeVar("Job", bound=Hashable)
Place = TypeVar("Place")
Found = TypeVar("Found")


def spread(
    jobs: Sequence[Job],
    places: Sequence[Place],
    work: Callable[[Job, Place], Found],
    *,
    most: int | None = None,
    told: Callable[[dict[Job, Found]], None] = lambda found: None,
) -> dict[Job, Found]:
    """What ``work`` found of each job, in the order of ``jobs``; it runs in threads.

    Jobs go to the places in turn, so that the numbers of two places differ by one at most, and equal jobs that follow
    each other are spread as well.

    Args:
        most: so many at once in one place; the next job goes to the first that has room. None: all at once.
        told: called in this thread with what there is, whenever there is more.

    Raises:
        Exception: what ``work`` raised; jobs that have begun end before, others do not begin.
    """
    room = deque(place for _ in range(most or len(jobs)) for place in places)
    waiting, found = deque(jobs), dict[Job, Found]()
    running: dict[Future[Found], tuple[Job, Place]] = {}
    with ThreadPoolExecutor(max_workers=max(1, min(len(room), len(jobs)))) as pool:
        while waiting or running:
            while waiting and room:
                job, place = waiting.popleft(), room.popleft()
                running[pool.submit(work, job, place)] = (job, place)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, place = running.pop(future)
                found[job] = future.result()
                room.append(place)
            told({job: found[job] for job in jobs if job in found})
    return {job: found[job] for job in jobs}
