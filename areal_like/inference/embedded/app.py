"""HTTP around the service: routes, the bearer token, and errors as status codes (areal_like/api/wire.py)."""

from __future__ import annotations

import hmac

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from areal_like.api.weights import CommitReceipt
from areal_like.api.wire import (
    AbortBody,
    ClaimBody,
    CommitBody,
    ControlBody,
    DigestAnswer,
    GenerateBody,
    HealthAnswer,
    PauseAnswer,
    PauseBody,
    StageAnswer,
    StageBody,
)
from areal_like.errors import (
    InfrastructureError,
    RequestError,
    ServerUnavailable,
    StaleCommand,
    WeightUpdateError,
)
from areal_like.inference.embedded.service import Gone, InferenceService

#: the first class that an error is an instance of gives its status
_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (RequestError, 400),
    (StaleCommand, 409),
    (WeightUpdateError, 409),
    (ServerUnavailable, 503),
    (InfrastructureError, 500),
)


def make_app(service: InferenceService, token: str) -> ASGIApp:
    """The ASGI application; every path asks for ``Authorization: Bearer <token>``."""
    app = FastAPI(title="areal_like embedded engine", openapi_url=None)
    _add_routes(app, service)
    for kind in (RequestError, InfrastructureError):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    return FrontDoor(GenerateEndpoint(service), app, token)


class FrontDoor:
    """Checks the run's token, and takes ``POST /generate`` past FastAPI.

    At hundreds of short requests a second the layers that a request passes are what costs: router, three middlewares
    and parameter machinery took longer than the model (measured with a game of one-token answers).
    """

    def __init__(self, generate: ASGIApp, rest: ASGIApp, token: str) -> None:
        self._generate = generate
        self._rest = rest
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_authorised(scope):
            refusal = _error_response(401, "Unauthorized", "the Authorization header must carry this run's token")
            await refusal(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == "/generate" and scope["method"] == "POST":
            await self._generate(scope, receive, send)
        else:
            await self._rest(scope, receive, send)

    def _is_authorised(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)


class GenerateEndpoint:
    """``POST /generate`` as a plain ASGI application."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = GenerateBody.model_validate_json(await _read_body(receive))
            request = await self._service.generate(body, _gone(receive))
            response = Response(to_json(request.answer()), media_type="application/json")
        except ValidationError as error:
            response = _error_response(400, "RequestError", _first_fault(error.errors()))
        except (RequestError, InfrastructureError) as error:
            response = _refusal(error)
        except ClientDisconnect:
            return
        await response(scope, receive, send)


async def _read_body(receive: Receive) -> bytes:
    chunks = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _add_routes(app: FastAPI, service: InferenceService) -> None:
    @app.post("/abort")
    async def abort(body: AbortBody) -> dict[str, int]:
        return {"aborted": await service.abort(body)}

    @app.post("/pause")
    async def pause(body: PauseBody) -> PauseAnswer:
        return await service.pause(body)

    @app.post("/resume")
    async def resume(body: ControlBody) -> PauseAnswer:
        return await service.resume(body)

    @app.post("/claim")
    async def claim(body: ClaimBody) -> HealthAnswer:
        return service.claim(body)

    @app.post("/weights/stage")
    async def stage(body: StageBody) -> StageAnswer:
        return await service.stage(body)

    @app.post("/weights/commit")
    async def commit(body: CommitBody, http: HttpRequest) -> CommitReceipt:
        return await service.commit(body, _gone(http.receive))

    @app.get("/weights/digest")
    async def digest() -> DigestAnswer:
        return await service.digest()

    @app.get("/health")
    async def health() -> HealthAnswer:
        return service.health()

    @app.get("/metrics")
    async def metrics() -> dict[str, float]:
        return service.metrics()


def _gone(receive: Receive) -> Gone:
    """After the body, the next thing a connection says is that it closed."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    return gone


async def _on_error(_: HttpRequest, error: Exception) -> Response:
    return _refusal(error)


async def _on_invalid(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _error_response(400, "RequestError", _first_fault(error.errors()))


async def _on_http_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error_response(error.status_code, "RequestError", str(error.detail))


def _first_fault(faults: object) -> str:
    """The first of pydantic's faults as one sentence, and how many more there are."""
    assert isinstance(faults, list | tuple) and faults
    first = faults[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{where}: {first['msg']}{more}"


def _refusal(error: Exception) -> Response:
    status = next(code for kind, code in _STATUS if isinstance(error, kind))
    return _error_response(status, type(error).__name__, str(error))


def _error_response(status: int, kind: str, message: str) -> Response:
    return JSONResponse({"error": {"type": kind, "message": message}}, status_code=status)
