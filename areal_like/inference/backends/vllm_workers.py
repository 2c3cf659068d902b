"""What a vLLM server's workers are asked through ``/collective_rpc``, and how their answers become one.

Our extension in them (``areal_like.inference.vllm_plugin.worker``) answers a refusal as data: an exception of one
worker would leave the answers of the others behind in vLLM's queues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from areal_like.api.weights import Manifest
from areal_like.errors import RequestError, ServerUnavailable
from areal_like.inference.backends.http_control import EngineHttp


class WorkerStatus(BaseModel):
    """What one worker says of its weights. ``refused``: why it did not do what this call asked, or empty.

    ``asleep``: tags of the device memory that it has given away, by vLLM's names.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    state: str
    error: str
    incarnation: int
    version: int
    digest: str
    staged_incarnation: int
    staged_version: int
    bytes: int
    seconds: float
    damaged: bool
    logprobs_mode: str
    seeds: bool
    sleeps: bool = False
    asleep: tuple[str, ...] = ()
    parts: dict[str, float] = {}
    refused: str = ""

    @property
    def loaded(self) -> tuple[int, int]:
        """(incarnation, version) of the live weights; -1 twice before the first update."""
        return self.incarnation, self.version

    @property
    def staged(self) -> tuple[int, int]:
        """(incarnation, version) that is staged or being staged; -1 twice where none is."""
        return self.staged_incarnation, self.staged_version

    def told(self) -> str:
        """In words, for errors."""
        error = f" ({self.error})" if self.error else ""
        return f"its workers are {self.state}{error}, staged {self.staged_version}, loaded {self.version}"


class VllmWorkers:
    """All workers of one server. Every call is one round trip; each raises as :meth:`status`."""

    def __init__(self, name: str, http: EngineHttp, tell: Callable[[WorkerStatus], None]) -> None:
        """``tell``: gets every answer first."""
        self._name, self._http, self._tell = name, http, tell

    async def status(self, *, timeout: float) -> WorkerStatus:
        """What they hold and what they are staging; they answer at once.

        Raises:
            ServerUnavailable: no answer, or one that is none.
        """
        return await self._ask("areal_like_status", {}, timeout=timeout)

    async def stage(self, manifest: Manifest, *, timeout: float) -> WorkerStatus:
        """Give up what was staged before, and begin to fetch ``manifest``; ``refused`` if it is old or does not fit."""
        told = {"manifest": manifest.model_dump_json(), "server": self._name}
        return await self._ask("areal_like_stage", told, timeout=timeout)

    async def begin(self, incarnation: int, version: int, *, timeout: float) -> WorkerStatus:
        """Let ``/finish_weight_update`` load this version, if it is staged, and no other; ``refused`` otherwise.

        Not refused where it is loaded already and nothing is staged. Any staging after this ends the permission.
        """
        named = {"incarnation": str(incarnation), "version": str(version)}
        return await self._ask("areal_like_begin", named, timeout=timeout)

    async def _ask(self, method: str, named: Mapping[str, str], *, timeout: float) -> WorkerStatus:
        body = {"method": method, "timeout": timeout, "kwargs": named}  # vLLM passes texts on, and nothing else
        try:
            answer = await self._http.post("/collective_rpc", body, timeout=timeout)
        except RequestError as error:
            raise ServerUnavailable(
                f"{error}; vLLM must run with VLLM_SERVER_DEV_MODE=1 and the flags that `areal-like serve` prints and "
                "docs/engines.md names"
            ) from error
        results: Sequence[Mapping[str, Any]] = (answer or {}).get("results") or ()
        try:
            found = [WorkerStatus.model_validate(result) for result in results]
        except ValidationError as error:
            raise ServerUnavailable(f"{self._name}: a worker's status breaks its schema: {error}") from error
        if not found:
            raise ServerUnavailable(f"{self._name}: no worker answered")
        status = common_status(found)
        self._tell(status)
        return status


def common_status(found: Sequence[WorkerStatus]) -> WorkerStatus:
    """The answer of the worker that is worst off: it refused, it is broken, it is not ready yet, it is behind.

    What any of them has given away is ``asleep``.
    """
    unlike = (
        [status for status in found if status.refused]
        or [status for status in found if status.state == "failed" or status.damaged]
        or [status for status in found if status.state == "staging"]
    )
    worst = unlike[0] if unlike else min(found, key=lambda status: status.loaded)
    asleep = {tag for status in found for tag in status.asleep}
    return worst.model_copy(update={"asleep": tuple(sorted(asleep))})
