"""Token ids in, token ids out, at a path of our own in vLLM's API server.

What vLLM's own paths do for a token, one Python process does; with a small model or many requests that is what limits a
server. The token is detokenised, decoded once more for its log-prob, held in objects of its own, and told by name. A
trainer reads none of that. Here nothing is detokenised (unless stop strings need it), log-probs are kept in flat lists
(vLLM's ``flat_logprobs``), an answer is put together when it has ended, and it is two lists of numbers:

    POST /areal_like/generate {"request_id", "token_ids", "sampling_params", "cache_salt"}
    -> {"token_ids": [int], "logprobs": [float or null], "finish_reason", "weight_versions": [{version, start, end}]}

``weight_versions`` is null where this vLLM does not tell them, a log-prob that is no finite number is null. GET answers
``{"protocol": 1}``.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from areal_like.inference.token_path import PATH, PROTOCOL
from areal_like.inference.vllm_plugin.access import App, Receive, Scope, Send

_ALLOWED = ((b"allow", b"GET, POST"),)


class _Refused(Exception):
    """``status``: of the answer."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Gone(Exception):
    """The client has closed its connection."""


class TokenRoute:
    """ASGI middleware. The engine is ``app.state.engine_client``, as for vLLM's own paths."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")) != PATH:
            await self._app(scope, receive, send)
            return
        with suppress(_Gone):
            try:
                if scope["method"] == "GET":
                    answer: Mapping[str, Any] = {"protocol": PROTOCOL}
                elif scope["method"] == "POST":
                    asked = _Asked.parse(await _body(receive))
                    answer = await _unless_gone(receive, asked, scope["app"].state.engine_client)
                else:
                    raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"{scope['method']}: GET and POST are answered")
                await _send(send, HTTPStatus.OK, answer)
            except _Refused as refused:
                error = {"type": refused.status.phrase, "message": str(refused), "code": int(refused.status)}
                await _send(send, refused.status, {"error": error})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    request_id: str
    token_ids: list[int]
    sampling_params: Mapping[str, Any]
    cache_salt: str | None

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Raises _Refused."""
        try:
            found = cls(**{"cache_salt": None, **json.loads(body)})
        except (TypeError, ValueError, RecursionError) as error:
            raise _Refused(HTTPStatus.BAD_REQUEST, f"the body is no request: {error}") from error
        ids = found.token_ids
        if not (isinstance(ids, list) and ids and all(type(token) is int and token >= 0 for token in ids)):
            raise _Refused(HTTPStatus.BAD_REQUEST, "token_ids: must be a list of token ids, at least one")
        if not isinstance(found.request_id, str) or not isinstance(found.sampling_params, dict):
            raise _Refused(HTTPStatus.BAD_REQUEST, "request_id must be a text and sampling_params an object")
        if found.cache_salt is not None and not (isinstance(found.cache_salt, str) and found.cache_salt):
            raise _Refused(HTTPStatus.BAD_REQUEST, "cache_salt: must be a text that is not empty, or null")
        return found

    def params(self, context_length: int, vocabulary: int) -> Any:
        """vLLM's ``SamplingParams``.

        What vLLM would leave out, cut, or send on to an engine that ends of it, is refused.

        Raises:
            _Refused: no such field or value, more tokens than the context holds, or stop ids that do not exist.
        """
        params = _sampling_params(self.sampling_params)
        if params.max_tokens is None or len(self.token_ids) + params.max_tokens > context_length:
            raise _Refused(
                HTTPStatus.BAD_REQUEST,
                f"max_tokens: {params.max_tokens} behind {len(self.token_ids)} tokens; the context is {context_length}",
            )
        if strange := [token for token in params.stop_token_ids or () if not 0 <= token < vocabulary]:
            raise _Refused(HTTPStatus.BAD_REQUEST, f"stop_token_ids: {strange}: the vocabulary is {vocabulary}")
        _check_encodes((self.request_id, self.cache_salt, params))
        return params


def _sampling_params(given: Mapping[str, Any]) -> Any:
    """Raises _Refused."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    ours = {
        "n": 1,
        "logprobs": 0,  # of the sampled token alone
        "prompt_logprobs": None,
        "flat_logprobs": True,
        "detokenize": bool(given.get("stop")),
        "output_kind": RequestOutputKind.FINAL_ONLY,
        "skip_clone": True,  # nobody else has them
    }
    if unlike := sorted(name for name in ours if name in given and given[name] != ours[name]):
        raise _Refused(HTTPStatus.BAD_REQUEST, f"sampling_params: {', '.join(unlike)} cannot be chosen here")
    known = {name for name in SamplingParams.__annotations__ if not name.startswith("_")}
    if unknown := sorted(given.keys() - known):
        raise _Refused(HTTPStatus.BAD_REQUEST, f"sampling_params: this vLLM knows no {', '.join(unknown)}")
    if "max_tokens" not in given:
        raise _Refused(HTTPStatus.BAD_REQUEST, "sampling_params: max_tokens is missing")
    try:
        return _adapter(SamplingParams).validate_python({**given, **ours})
    except ValidationError as error:
        # either they are SamplingParams already, or what follows is wrong with them
        wrong = [entry for entry in error.errors() if entry["type"] != "is_instance_of"]
        told = "; ".join(f"{entry['loc'][-1]}: {entry['msg']}" for entry in wrong)
        raise _Refused(HTTPStatus.BAD_REQUEST, f"sampling_params: {told}") from error
    except Exception as error:  # vLLM's own kind since 0.32 is no ValueError
        raise _Refused(_status(error), f"sampling_params: {error}") from error


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    """What vLLM's own path checks types with: a wrong one would end the engine, where it is decoded."""
    return TypeAdapter(kind)


def _check_encodes(parts: object) -> None:
    """Raises _Refused: what cannot travel to the engine, such as integers of more than 64 bits or half characters."""
    import msgspec  # type: ignore[import-not-found]  # comes with vLLM

    try:
        msgspec.msgpack.encode(parts)
    except (OverflowError, TypeError, ValueError) as error:
        raise _Refused(HTTPStatus.BAD_REQUEST, f"the engine cannot be sent this: {error}") from error


async def _unless_gone(receive: Receive, asked: _Asked, engine: Any) -> Mapping[str, Any]:
    """The answer; where the client goes first, vLLM gives the request up. Raises _Gone, _Refused."""
    answer = asyncio.create_task(_answer(asked, engine))
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise _Gone
        return answer.result()
    finally:
        for task in (answer, gone):
            task.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)


async def _answer(asked: _Asked, engine: Any) -> dict[str, Any]:
    """Raises _Refused."""
    from vllm.inputs.engine import tokens_input

    params = asked.params(engine.model_config.max_model_len, engine.model_config.get_vocab_size())
    prompt = tokens_input(asked.token_ids, cache_salt=asked.cache_salt)
    last = None
    try:
        async for output in engine.generate(prompt, params, asked.request_id):
            last = output
    except Exception as error:  # vLLM wraps what it did not expect, without a word of its own
        said = str(error) or repr(error.__cause__)
        raise _Refused(_status(error), f"{type(error).__name__}: {said}") from error
    if last is None or len(last.outputs) != 1:
        raise _Refused(HTTPStatus.INTERNAL_SERVER_ERROR, "the engine ended the request without an answer")
    choice = last.outputs[0]
    if choice.finish_reason == "error":
        raise _Refused(HTTPStatus.INTERNAL_SERVER_ERROR, "the engine ended the request with an error")
    return _told(choice)


def _status(error: Exception) -> HTTPStatus:
    """vLLM's own split: errors of the client, those that name a status, and all others."""
    named = getattr(error, "http_status", None)
    if isinstance(named, int):
        return HTTPStatus(named)
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return HTTPStatus.BAD_REQUEST if kinds & _OF_THE_CLIENT else HTTPStatus.INTERNAL_SERVER_ERROR


#: by name, since a version has one of them or the other
_OF_THE_CLIENT = {"ValueError", "VLLMClientError"}


def _told(choice: Any) -> dict[str, Any]:
    """Raises _Refused: the log-probs are not those of the tokens."""
    tokens, found = list(choice.token_ids), choice.logprobs
    # a position begins with the sampled token; others that were asked for beside it may follow
    starts: Sequence[int] = found.start_indices if found is not None else ()
    if [found.token_ids[i] for i in starts] != tokens:
        raise _Refused(
            HTTPStatus.INTERNAL_SERVER_ERROR, f"{len(tokens)} tokens with the log-probs of {len(starts)} others"
        )
    values = [found.logprobs[i] for i in starts]
    spans = getattr(choice, "weight_versions", None)
    return {
        "token_ids": tokens,
        "logprobs": [value if math.isfinite(value) else None for value in values],
        "finish_reason": choice.finish_reason,
        "weight_versions": spans
        and [{"version": span.version, "start": span.start, "end": span.end} for span in spans],
    }


async def _body(receive: Receive) -> bytes:
    """Raises _Gone."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise _Gone
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, status: HTTPStatus, answer: Mapping[str, Any]) -> None:
    body = json.dumps(answer, separators=(",", ":"), allow_nan=False).encode()
    allowed = _ALLOWED if status is HTTPStatus.METHOD_NOT_ALLOWED else ()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *allowed]
    await send({"type": "http.response.start", "status": int(status), "headers": headers})
    await send({"type": "http.response.body", "body": body})
