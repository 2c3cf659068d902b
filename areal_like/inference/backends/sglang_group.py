"""Weights into SGLang over its own weight-update group, whose rank 0 is the trainer (``weights.transports.door``).

    stage: reach the trainer's door, meet in a group (kept over versions), ask for the checksums to expect
    apply: begin_weight_update --> for each run of tensors: one broadcast --> end_weight_update

Bytes go straight into the live weights, so nothing is sent before the pause, and a transfer that breaks leaves the
server damaged: it stays out until a whole update went through, over a new group. SGLang gives its groups no time limit
of ours: if its trainer is lost in the middle of a tensor, over gloo, it waits for half an hour; it is told to be
restarted, and asked nothing meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from areal_like.api.weights import Manifest, TensorEntry
from areal_like.errors import ArealLikeError, WeightUpdateError
from areal_like.inference.backends.http_control import EngineHttp
from areal_like.inference.backends.sglang_load import CHECKSUM_CHARACTERS, Refused, live_members
from areal_like.inference.backends.sglang_server import ServerFacts
from areal_like.weights.manifest import ITEM_BYTES

#: seconds for small calls beside an update
_SMALL = 30.0
#: seconds within which a scheduler that runs hears a call, however long its steps are
_HEARS = 15.0
#: bytes of the longest line of the door
_LONGEST = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """A manifest's location: the trainer's store, its door, and the key of the offer."""

    host: str
    port: int
    door: int
    key: str
    bucket_bytes: int
    backend: str

    @classmethod
    def parse(cls, location: str) -> Meeting:
        """Raises WeightUpdateError for what is no location of the collective transport."""
        try:
            parts = urlsplit(location)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            return cls(
                host=parts.hostname or "",
                port=parts.port or 0,
                door=int(query["door"]),
                key=parts.path.lstrip("/"),
                bucket_bytes=int(query["bucket_bytes"]),
                backend=query["backend"],
            )
        except (KeyError, ValueError) as error:
            raise WeightUpdateError(f"{location!r} is no location of the collective transport: {error}") from error


class GroupLoad:
    """:class:`areal_like.inference.backends.sglang_load.Load` over a process group."""

    def __init__(self) -> None:
        self._door: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._at: tuple[str, int] = ("", 0)
        self._group = ""
        self._left: list[str] = []
        self._meeting: Meeting | None = None
        self._runs: Sequence[Sequence[TensorEntry]] = ()
        self._checksums: Mapping[str, str] = {}

    @property
    def checksums(self) -> Mapping[str, str]:
        return self._checksums

    async def stage(self, manifest: Manifest, facts: ServerFacts, http: EngineHttp) -> None:
        self._meeting = None
        meeting = Meeting.parse(manifest.location)
        if facts.pipeline > 1:
            raise WeightUpdateError("weights.transport=collective: SGLang takes no updates over groups with pipelines")
        if meeting.backend == "nccl" and facts.device != "cuda":
            raise WeightUpdateError(f"weights.group=nccl, and the server is on {facts.device}: use weights.group=gloo")
        if not self._stands(meeting):
            await _check_hears(http)
        try:
            await self._meet(meeting, facts, http)
            comparable = facts.device == "cpu" and facts.ranks == 1
            same = [entry for entry in manifest.tensors if entry.dtype == facts.dtype] if comparable else []
            members = live_members(same)
            asked = [[entry.name for entry in part] for part in members.values()]
            sums = (await self._ask(meeting, {"op": "sums", "members": asked}))["sums"]
        except (OSError, ValueError, ArealLikeError) as error:
            await self._leave(http)
            raise WeightUpdateError(f"version {manifest.version}: the trainer's door: {error}") from error
        except asyncio.CancelledError:
            self._shut()  # an answer that nobody read would be taken for that to the next question
            raise
        self._checksums = {name: value[:CHECKSUM_CHARACTERS] for name, value in zip(members, sums, strict=True)}
        self._runs = runs(manifest.tensors, meeting.bucket_bytes)
        self._meeting = meeting

    async def apply(self, http: EngineHttp, label: str, *, flush: bool, timeout: float) -> None:
        meeting, self._meeting = self._meeting, None
        if meeting is None:
            raise Refused("nothing is staged")
        deadline = time.monotonic() + timeout
        try:
            async with asyncio.timeout(timeout):
                await self._begin(http)
                for place, run in enumerate(self._runs):
                    last = {"weight_version": label, "flush_cache": flush} if place == len(self._runs) - 1 else {}
                    await self._send(http, meeting, run, last, deadline - time.monotonic())
                await http.post("/end_weight_update", {}, timeout=_SMALL)
        except (TimeoutError, OSError, ValueError, ArealLikeError) as error:
            await self._leave(http)  # first: it may still wait for bytes in there
            with suppress(ArealLikeError):
                await http.post("/end_weight_update", {}, timeout=_HEARS)
            if isinstance(error, Refused):
                raise
            raise WeightUpdateError(f"the transfer broke: {type(error).__name__}: {error}") from error
        except asyncio.CancelledError:
            self._shut()
            raise

    async def aclose(self) -> None:
        self._shut()

    # -- the group --

    async def _meet(self, meeting: Meeting, facts: ServerFacts, http: EngineHttp) -> None:
        """Be in a group with the trainer; the one from before, if its connection still stands."""
        if self._stands(meeting):
            return
        await self._leave(http)
        self._door = await asyncio.open_connection(meeting.host, meeting.door, limit=_LONGEST)
        self._at = (meeting.host, meeting.door)
        name = f"areal-like-{secrets.token_hex(8)}"
        world = 1 + facts.ranks
        joined = {
            "master_address": meeting.host, "master_port": meeting.port, "rank_offset": 1, "world_size": world,
            "group_name": name, "backend": meeting.backend,
        }  # fmt: skip
        ready = await self._ask(meeting, {"op": "join", "group": name, "world": world})
        if not ready.get("ready"):
            raise WeightUpdateError(f"it answers {ready}")
        await _both(self._hear(), http.post("/init_weights_update_group", joined, timeout=_SMALL))
        self._group = name

    def _stands(self, meeting: Meeting) -> bool:
        """We are in a group with that trainer, as far as we know."""
        at = (meeting.host, meeting.door)
        return self._door is not None and bool(self._group) and self._at == at and not self._door[0].at_eof()

    async def _leave(self, http: EngineHttp) -> None:
        """Forget every group, here and in the server, whatever its state: what comes too late fails by its name."""
        self._shut()
        left, self._left = self._left, []
        for name in left:
            with suppress(ArealLikeError):
                await http.post("/destroy_weights_update_group", {"group_name": name}, timeout=_HEARS)

    async def _begin(self, http: EngineHttp) -> None:
        """Open the server's session; one that somebody left open is closed first."""
        try:
            await http.post("/begin_weight_update", {}, timeout=_SMALL)
        except ArealLikeError:
            with suppress(ArealLikeError):
                await http.post("/end_weight_update", {}, timeout=_SMALL)
            try:
                await http.post("/begin_weight_update", {}, timeout=_SMALL)
            except ArealLikeError as error:
                raise Refused(str(error)) from error

    async def _send(
        self, http: EngineHttp, meeting: Meeting, run: Sequence[TensorEntry], last: Mapping[str, Any], timeout: float
    ) -> None:
        """One broadcast. The server is told only once the trainer is about to send: it would wait for minutes."""
        names = [entry.name for entry in run]
        await self._ask(meeting, {"op": "send", "names": names})
        body = {
            "names": names,
            "dtypes": [entry.dtype for entry in run],
            "shapes": [list(entry.shape) for entry in run],
            "group_name": self._group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            **last,
        }
        await _both(self._hear(), http.post("/update_weights_from_distributed", body, timeout=max(timeout, 0.1)))

    # -- the door --

    def _shut(self) -> None:
        """Leave; the trainer's side ends with the connection, and with it the group."""
        if self._group:
            self._left.append(self._group)
        door, self._door, self._group = self._door, None, ""
        if door is not None:
            door[1].close()

    async def _ask(self, meeting: Meeting, question: Mapping[str, Any]) -> dict[str, Any]:
        """The door's first answer. Raises WeightUpdateError for an error, OSError for a broken connection."""
        if self._door is None:
            raise WeightUpdateError("it is shut")
        self._door[1].write(json.dumps({"key": meeting.key, **question}).encode() + b"\n")
        await self._door[1].drain()
        return await self._hear()

    async def _hear(self) -> dict[str, Any]:
        if self._door is None:
            raise WeightUpdateError("it is shut")
        line = await self._door[0].readline()
        if not line:
            raise ConnectionResetError("the trainer is gone")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WeightUpdateError(str(answer["error"]))
        return answer


async def _check_hears(http: EngineHttp) -> None:
    """Raises WeightUpdateError unless the scheduler runs: it would join a group when nobody is in it any more."""
    try:
        await http.get("/server_info", timeout=_HEARS)
    except ArealLikeError as error:
        raise WeightUpdateError(
            f"its scheduler does not answer ({error}): it may still wait for a trainer that was lost while it sent, up "
            "to gloo's limit of half an hour; restart the server, or try again later"
        ) from error


async def _both(hear: Coroutine[Any, Any, Any], tell: Coroutine[Any, Any, Any]) -> None:
    """Both sides of a collective call at once; the first that fails ends the other. Raises WeightUpdateError."""
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(hear)
            tasks.create_task(tell)
    except ExceptionGroup as errors:
        raise WeightUpdateError("; ".join(str(error) for error in errors.exceptions)) from errors


def runs(entries: Sequence[TensorEntry], most: int) -> list[list[TensorEntry]]:
    """Tensors cut into runs of at most ``most`` bytes (one tensor may be more), aligned within a run. Pure."""
    found: list[list[TensorEntry]] = []
    size = 0
    for entry in entries:
        if not found or size + entry.nbytes > most or size % ITEM_BYTES[entry.dtype]:
            found.append([])
            size = 0
        found[-1].append(entry)
        size += entry.nbytes
    return found
