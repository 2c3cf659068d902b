"""Control calls to one server. They are rare, so each opens a connection of its own: none is reused after an error."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NoReturn, Protocol, TypeVar, runtime_checkable

import httpx
from pydantic import BaseModel, ValidationError

from areal_like.api.weights import CommitReceipt, InterruptMode, Manifest
from areal_like.api.wire import (
    AbortBody,
    ClaimBody,
    CommitBody,
    ControlBody,
    DigestAnswer,
    HealthAnswer,
    PauseAnswer,
    PauseBody,
    StageAnswer,
    StageBody,
)
from areal_like.client.http_errors import error_message, error_type
from areal_like.errors import RequestError, ServerUnavailable, StaleCommand, WeightUpdateError

_Answer = TypeVar("_Answer", bound=BaseModel)


class ServerControl(Protocol):
    """What the controller asks of an inference server, whatever its engine. ``timeout``: seconds for the whole call.

    Every method raises ServerUnavailable (no answer in time, no connection, a broken answer), StaleCommand (the
    server has seen a newer incarnation or version) or RequestError (any other refusal).
    """

    async def health(self, *, timeout: float) -> HealthAnswer: ...

    async def pause(self, *, incarnation: int, mode: InterruptMode, timeout: float) -> PauseAnswer: ...

    async def resume(self, *, incarnation: int, timeout: float) -> PauseAnswer: ...

    async def stage(self, manifest: Manifest, *, timeout: float) -> StageAnswer:
        """Raises WeightUpdateError instead of RequestError."""
        ...

    async def commit(self, *, version: int, incarnation: int, mode: InterruptMode, timeout: float) -> CommitReceipt:
        """Raises WeightUpdateError instead of RequestError."""
        ...

    async def abort(self, rids: Sequence[str], *, timeout: float) -> int:
        """Cut requests (all if ``rids`` is empty) and return how many; they are answered with what they have."""
        ...

    async def aclose(self) -> None: ...


@runtime_checkable
class TellsDigest(Protocol):
    """A control whose server can say what its live weights hold."""

    async def digest(self, *, timeout: float) -> DigestAnswer: ...


@runtime_checkable
class ClaimsServer(Protocol):
    """A control whose server grants an incarnation to one run alone."""

    async def claim(self, *, incarnation: int, run_id: str, timeout: float) -> HealthAnswer:
        """Raises StaleCommand where another run has it, or a newer one."""
        ...


class EmbeddedControl:
    """:class:`ServerControl` over ``areal_like.api.wire``."""

    def __init__(self, name: str, url: str, *, token: str, named_by_us: bool = True) -> None:
        """``named_by_us``: the server was started under ``name``, and its receipts must say so."""
        self._name = name
        self._named_by_us = named_by_us
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=None,  # every call has a deadline of its own
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,  # a proxy of the environment must not see the run's token
        )

    async def health(self, *, timeout: float) -> HealthAnswer:
        return await self._call("GET", "/health", HealthAnswer, timeout)

    async def digest(self, *, timeout: float) -> DigestAnswer:
        """What the server's live weights hold now."""
        return await self._call("GET", "/weights/digest", DigestAnswer, timeout)

    async def claim(self, *, incarnation: int, run_id: str, timeout: float) -> HealthAnswer:
        body = ClaimBody(incarnation=incarnation, run_id=run_id)
        return await self._call("POST", "/claim", HealthAnswer, timeout, body)

    async def pause(self, *, incarnation: int, mode: InterruptMode, timeout: float) -> PauseAnswer:
        return await self._call("POST", "/pause", PauseAnswer, timeout, PauseBody(incarnation=incarnation, mode=mode))

    async def resume(self, *, incarnation: int, timeout: float) -> PauseAnswer:
        return await self._call("POST", "/resume", PauseAnswer, timeout, ControlBody(incarnation=incarnation))

    async def stage(self, manifest: Manifest, *, timeout: float) -> StageAnswer:
        body = StageBody(manifest=manifest)
        return await self._weights("/weights/stage", StageAnswer, timeout, body)

    async def commit(self, *, version: int, incarnation: int, mode: InterruptMode, timeout: float) -> CommitReceipt:
        body = CommitBody(version=version, incarnation=incarnation, mode=mode)
        receipt = await self._weights("/weights/commit", CommitReceipt, timeout, body)
        return receipt if self._named_by_us else receipt.model_copy(update={"server": self._name})

    async def abort(self, rids: Sequence[str], *, timeout: float) -> int:
        answer = await self._call("POST", "/abort", _AbortAnswer, timeout, AbortBody(rids=list(rids)))
        return answer.aborted

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _weights(self, path: str, kind: type[_Answer], timeout: float, body: BaseModel) -> _Answer:
        try:
            return await self._call("POST", path, kind, timeout, body)
        except RequestError as error:
            raise WeightUpdateError(str(error)) from error

    async def _call(
        self, method: str, path: str, kind: type[_Answer], timeout: float, body: BaseModel | None = None
    ) -> _Answer:
        where = f"{self._name} {path}"
        content = None if body is None else body.model_dump_json()
        try:
            async with asyncio.timeout(timeout):
                response = await self._http.request(
                    method, path, content=content, headers={"Content-Type": "application/json"}
                )
        except TimeoutError:
            raise ServerUnavailable(f"{where}: no answer within {timeout:g} s") from None
        except httpx.HTTPError as error:
            raise ServerUnavailable(f"{where}: {type(error).__name__}: {error}") from error
        if response.status_code != httpx.codes.OK:
            _refuse(where, response.status_code, response.content)
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:
            raise ServerUnavailable(f"{where}: the answer does not follow the wire schema: {error}") from error


class _AbortAnswer(BaseModel):
    aborted: int


def _refuse(where: str, status: int, content: bytes) -> NoReturn:
    message = f"{where}: {status}: {error_message(content)}"
    if error_type(content) == WeightUpdateError.__name__:
        raise WeightUpdateError(message)
    if status == httpx.codes.CONFLICT:
        raise StaleCommand(message)
    if 400 <= status < 500:
        raise RequestError(message)
    raise ServerUnavailable(message)
