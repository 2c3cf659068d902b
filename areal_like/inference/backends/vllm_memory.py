"""A vLLM server that lends its device memory (``/sleep``, ``/wake_up``).

What vLLM does badly, and what is done about it here (read on 0.32): its default sleep cuts requests in hand, so a busy
server is refused, and ``mode=wait`` covers those that come in between; ``/resume`` runs a server whose KV cache is out,
which ends it, so what is out is remembered here; the last ``/wake_up`` runs the server by itself, on weights that may
be nobody's, so it waits for a whole update; on CPUs both calls answer 200 and do nothing, so they are refused. A
server that an earlier run has left asleep answers as if it were paused: its workers say what is out. A sleep that fails
inside (memory that somebody else took meanwhile counts as such) leaves memory out of which the engine knows nothing:
``/wake_up`` answers 200 then, and does nothing.
"""

from __future__ import annotations

from areal_like.client.memory import MemoryPart
from areal_like.errors import RequestError, WeightUpdateError
from areal_like.inference.backends.http_control import EngineHttp
from areal_like.inference.backends.memory import LentMemory
from areal_like.inference.backends.vllm_workers import WorkerStatus

#: for ``plan`` and ``doctor``
NEEDS = "on GPUs, with vllm.enable_sleep_mode: true"


class VllmMemory:
    """Of one server; its control calls this, and runs nothing while memory is out."""

    def __init__(self, name: str, http: EngineHttp) -> None:
        self._name, self._http = name, http
        self._met = False
        self.lent = LentMemory(name)

    def meet(self, status: WorkerStatus) -> None:
        """Of the first answer: what is out already was released by somebody before us, and its weights are nobody's."""
        if not self._met and status.asleep:
            self.lent.released([part for part in MemoryPart if part in status.asleep], lost=True)
        self._met = True

    async def release(self, *, possible: bool, in_hand: int, keep_weights: bool, timeout: float) -> bool:
        """See :class:`areal_like.client.memory.ReleasesMemory`; whether anything was released now.

        Weights that are kept lie in host memory (level 1). ``possible``: it sleeps in earnest. ``in_hand``: requests.
        """
        if not possible:
            raise RequestError(f"{self._name}: memory is released {NEEDS}; this server was started without that flag")
        if not self.lent.check_release():
            return False
        if in_hand:
            raise RequestError(
                f"{self._name}: memory is not released while requests run (it would cut {in_hand}); drain first"
            )
        self.lent.released(MemoryPart, lost=not keep_weights)  # whether the answer comes or not: it may have happened
        level = 1 if keep_weights else 2
        await self._http.text("POST", f"/sleep?level={level}&mode=wait", timeout=timeout)
        return True

    async def reclaim(self, part: MemoryPart, *, timeout: float) -> bool:
        """Whether the workers were told to take ``part`` back now. vLLM runs again by itself with the last part."""
        if not self.lent.check_reclaim(part):
            return False
        await self._http.text("POST", f"/wake_up?tags={part}", timeout=timeout)
        return True

    def reclaimed(self, part: MemoryPart, status: WorkerStatus) -> None:
        """``status``: what the workers say after that.

        Raises:
            WeightUpdateError: it is still out.
        """
        if part in status.asleep:
            raise WeightUpdateError(
                f"{self._name}: vLLM says that it took back {part}, and its workers have not: their release had failed "
                "half-way; restart the server"
            )
        self.lent.reclaimed(part)
