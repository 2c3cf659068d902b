"""An SGLang server that lends its device memory (``/release_memory_occupation``, ``/resume_memory_occupation``).

What SGLang does badly, and what is done about it here (read on 0.5.23): a release while a request runs ends the server,
so it is paused first, and its scheduler asked whether nothing runs; a second resume of the same part ends it, so what
is out is remembered here; without ``enable_memory_saver`` both calls answer 200 and do nothing, so they are refused.
"""

from __future__ import annotations

import time

from areal_like.client.memory import MemoryPart
from areal_like.errors import RequestError
from areal_like.inference.backends.http_control import EngineHttp
from areal_like.inference.backends.memory import LentMemory
from areal_like.inference.backends.sglang_server import ServerFacts, ServerState

#: for ``plan`` and ``doctor``
NEEDS = "on GPUs, with sglang.enable_memory_saver: true (and the package torch-memory-saver)"
#: SGLang's names of a part; graphs hold memory that is needed to run
_TAGS = {MemoryPart.WEIGHTS: ["weights"], MemoryPart.KV_CACHE: ["kv_cache", "cuda_graph"]}
#: seconds for putting things right
_MEND_TIMEOUT = 10.0


class SglangMemory:
    """Of one server; its control calls this, and runs nothing while memory is out."""

    def __init__(self, name: str, http: EngineHttp, state: ServerState) -> None:
        self._name, self._http, self._state = name, http, state
        self.lent = LentMemory(name)

    async def release(self, facts: ServerFacts, *, keep_weights: bool, paused: bool, timeout: float) -> bool:
        """See :class:`areal_like.client.memory.ReleasesMemory`; whether anything was released now.

        ``keep_weights`` without ``enable_weights_cpu_backup``: they stay where they are. ``paused``: it stood before.
        """
        if not facts.saves_memory:
            raise RequestError(
                f"{self._name}: memory is released {NEEDS}; this server runs on {facts.device} without that flag"
            )
        if not self.lent.check_release():
            return False
        deadline = time.monotonic() + timeout
        await self._stand_idle(paused=paused, timeout=timeout)
        in_place = keep_weights and not facts.backs_weights_up
        parts = [MemoryPart.KV_CACHE] if in_place else list(MemoryPart)
        self.lent.released(parts, lost=not keep_weights)  # whether the answer comes or not: it may have happened
        tags = [tag for part in parts for tag in _TAGS[part]]
        await self._http.text("POST", "/release_memory_occupation", {"tags": tags}, timeout=_left(deadline))
        return True

    async def reclaim(self, part: MemoryPart, *, timeout: float) -> bool:
        """Whether anything was taken back now. Does not let the server run."""
        if not self.lent.check_reclaim(part):
            return False
        await self._http.text("POST", "/resume_memory_occupation", {"tags": _TAGS[part]}, timeout=timeout)
        self.lent.reclaimed(part)
        return True

    async def _stand_idle(self, *, paused: bool, timeout: float) -> None:
        """Paused, with nothing in hand, says its scheduler; if it has, nothing changes. Requests are held back here."""
        deadline = time.monotonic() + timeout
        closed, self._state.closed = self._state.closed, True
        try:
            await self._http.text("POST", "/flush_cache", timeout=timeout)
            await self._http.post("/pause_generation", {"mode": "in_place"}, timeout=_left(deadline))
            await self._http.text("POST", "/flush_cache", timeout=_left(deadline))
        except BaseException as error:
            self._state.closed = closed
            if not paused:
                await self._http.post("/continue_generation", {}, timeout=_MEND_TIMEOUT)
            if isinstance(error, RequestError):
                raise RequestError(
                    f"{self._name}: memory is not released while requests run (it would end the server); drain first"
                ) from error
            raise


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.1)
