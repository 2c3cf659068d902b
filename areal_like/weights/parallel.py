"""Threads for bytes in host memory: hashing, copying, reading and writing all release the GIL."""

from __future__ import annotations

import os

#: more than this many do not pay: memory is the limit then
_MOST = 16
#: cores for each thread: engines, trainers and their own threads need the others
_SHARE = 4


def host_threads() -> int:
    """A quarter of the cores that this process may use, one at least."""
    return max(1, min(len(os.sched_getaffinity(0)) // _SHARE, _MOST))
