"""Device memory that a server lends to somebody on the same device, such as the trainer, and takes back.

    release --> reclaim(WEIGHTS) --> [stage, commit: where the weights were given up] --> reclaim(KV_CACHE): it serves

Not every engine can, and those that can need a flag: ``plan`` and ``doctor`` say which.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol, runtime_checkable

from areal_like.client.control import ServerControl
from areal_like.errors import RequestError


class MemoryPart(StrEnum):
    """What is taken back at once, in this order: weights are updated before there is room for KV."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


@runtime_checkable
class ReleasesMemory(Protocol):
    """A control whose server can do without its device memory for a while.

    Both calls raise what every call of a :class:`ServerControl` raises; RequestError where the server cannot (the
    message names the flag it needs), has requests in hand, or was asked in another order.
    """

    async def release_memory(self, *, incarnation: int, keep_weights: bool, timeout: float) -> None:
        """Give up KV cache and weights; the server stands until all is taken back.

        ``keep_weights``: what it serves stays known, in host memory or, where the engine cannot, where it is.
        Otherwise only a whole update (stage, commit) brings weights back, and the server refuses to serve before.
        Nothing is cut: a server with requests in hand is refused.
        """
        ...

    async def reclaim_memory(self, part: MemoryPart, *, incarnation: int, timeout: float) -> None:
        """Take a part back; of a part that is there, nothing. With the last one the server serves again."""
        ...


def memory_of(control: ServerControl, name: str) -> ReleasesMemory:
    """The control of server ``name``, if its engine can release memory at all.

    Raises:
        RequestError: it cannot.
    """
    if isinstance(control, ReleasesMemory):
        return control
    raise RequestError(f"{name}: its engine cannot release memory; vLLM and SGLang on GPUs can (areal-like doctor)")
