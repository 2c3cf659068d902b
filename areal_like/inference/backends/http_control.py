"""Control calls to an engine's own HTTP interface: one connection each, a deadline each, errors by name.

A connection is never used again: after a 500, vLLM's next answer on the same connection fails.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from areal_like.errors import RequestError, ServerUnavailable

#: characters of an error answer that are shown
_SHOWN = 500


class EngineHttp:
    """JSON calls to one server."""

    def __init__(self, name: str, url: str, *, token: str) -> None:
        self._name = name
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=None,  # every call has a deadline of its own
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,  # a proxy of the environment must not see the run's token
        )

    async def get(self, path: str, *, timeout: float) -> Any:
        """The answer's JSON; None where it is empty. Raises as :meth:`text`."""
        return _parsed(f"{self._name} {path}", await self.text("GET", path, timeout=timeout))

    async def post(self, path: str, body: Any = None, *, timeout: float) -> Any:
        """The answer's JSON; None where it is empty. Raises as :meth:`text`."""
        return _parsed(f"{self._name} {path}", await self.text("POST", path, body, timeout=timeout))

    async def text(self, method: str, path: str, body: Any = None, *, timeout: float) -> str:
        """The answer's text.

        Raises:
            ServerUnavailable: no answer within ``timeout`` seconds, no connection, or a 5xx.
            RequestError: a 4xx.
        """
        where = f"{self._name} {path}"
        try:
            async with asyncio.timeout(timeout):
                answer = await self._http.request(method, path, json=body)
        except TimeoutError:
            raise ServerUnavailable(f"{where}: no answer within {timeout:g} s") from None
        except httpx.HTTPError as error:
            raise ServerUnavailable(f"{where}: {type(error).__name__}: {error}") from error
        if answer.status_code == httpx.codes.OK:
            return answer.text
        message = f"{where}: {answer.status_code}: {_words(answer.text)}"
        if 400 <= answer.status_code < 500:
            raise RequestError(message)
        raise ServerUnavailable(message)

    async def aclose(self) -> None:
        await self._http.aclose()


async def running_version(engine: str, address: str, *, token: str, timeout: float) -> str:
    """The ``version`` in the JSON that a running server of ``engine`` answers at ``address``.

    Raises:
        ServerUnavailable: no answer within ``timeout`` seconds, or not one of that engine.
        RequestError: it asks for another token.
    """
    headers = {"Authorization": f"Bearer {token}"}
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=timeout, headers=headers) as http:
            answer = await http.get(address)
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise RequestError(f"{address}: {answer.status_code}: it asks for another bearer token")
        answer.raise_for_status()
        return str(answer.json()["version"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ServerUnavailable(f"{address}: no {engine} answers there: {error!r}") from error


def _parsed(where: str, text: str) -> Any:
    if not text:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise ServerUnavailable(f"{where}: the answer is no JSON: {text[:_SHOWN]!r}") from error


def _words(text: str) -> str:
    """The message out of ``{"error": {"message": ...}}`` or ``{"error": ...}``, else the text itself."""
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return text[:_SHOWN] or "(empty body)"
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)
