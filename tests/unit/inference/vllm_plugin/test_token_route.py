"""Our path in vLLM's API server, as an application behind real HTTP; vLLM's part is played (``vllm_standins``)."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from uvicorn.server import ServerState

from areal_like.api.generation import StopReason
from areal_like.api.wire import GenerateBody, SamplingBody
from areal_like.errors import ServerUnavailable
from areal_like.inference.backends.epoch import ServerEpoch
from areal_like.inference.backends.vllm_dialect import VllmDialect
from areal_like.inference.token_path import PATH
from areal_like.inference.vllm_plugin.access import TOKEN_VARIABLE, Message, Scope
from areal_like.inference.vllm_plugin.front_door import FrontDoor
from areal_like.inference.vllm_plugin.token_route import TokenRoute
from tests.unit.inference.vllm_plugin.vllm_standins import (
    CONTEXT,
    VOCABULARY,
    Engine,
    RequestOutputKind,
    VLLMClientError,
    flat,
    install,
    output,
)

TOKEN = "secret"


@asynccontextmanager
async def served(engine: Engine, root_path: str = "") -> AsyncIterator[httpx.AsyncClient]:
    """An application as vLLM makes it, with our front door before it."""
    app = FastAPI()
    app.root_path = root_path
    app.state.engine_client = engine
    app.add_middleware(FrontDoor)
    app.add_api_route("/theirs", lambda: {"theirs": True})
    config, state = uvicorn.Config(app, lifespan="off", log_config=None), ServerState()
    config.load()

    def protocol() -> Any:
        return config.http_protocol_class(config=config, server_state=state, app_state={})  # type: ignore[call-arg]

    # uvicorn's own server around this looks about ten times a second
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with server, httpx.AsyncClient(base_url=address, headers=headers, trust_env=False, timeout=30) as http:
        yield http
    await asyncio.gather(*state.tasks)


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    install(monkeypatch)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def http(engine: Engine, caplog: pytest.LogCaptureFixture) -> AsyncIterator[httpx.AsyncClient]:
    """Whatever comes, the application ends as it should: uvicorn has nothing to say."""
    async with served(engine) as client:
        yield client
    assert [record.getMessage() for record in caplog.get_records("call") if record.name == "uvicorn.error"] == []


def body(**changes: Any) -> dict[str, Any]:
    whole = {"request_id": "r.1", "token_ids": [5, 6], "sampling_params": {"max_tokens": 4}, "cache_salt": "v3"}
    return {name: value for name, value in {**whole, **changes}.items() if value is not ...}


def said(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert error["code"] == answer.status_code
    return str(error["message"])


def raw(http: httpx.AsyncClient, content: bytes, length: int) -> bytes:
    return (
        f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {length}\r\n\r\n".encode()
        + content
    )


async def connected(http: httpx.AsyncClient) -> asyncio.StreamWriter:
    at = urlsplit(str(http.base_url))
    _, writer = await asyncio.open_connection(at.hostname, at.port)
    return writer


# -- answers --


async def test_an_answer_is_its_tokens_their_logprobs_and_why_it_ended(engine: Engine, http: httpx.AsyncClient) -> None:
    answer = await http.post(PATH, json=body(sampling_params={"max_tokens": 4, "temperature": 0.5}))
    assert answer.json() == {
        "token_ids": [7, 8],
        "logprobs": [-0.5, -1.5],
        "finish_reason": "length",
        "weight_versions": None,
    }
    prompt, params, rid = engine.asked[0]
    assert (prompt, rid) == ({"ids": [5, 6], "salt": "v3"}, "r.1")
    assert (params.max_tokens, params.temperature, params.n, params.logprobs) == (4, 0.5, 1, 0)
    assert (params.flat_logprobs, params.detokenize, params.output_kind) == (True, False, RequestOutputKind.FINAL_ONLY)


@pytest.mark.parametrize(("stop", "detokenized"), [(["x"], True), ("x", True), ([], False), (None, False)])
async def test_text_is_made_for_stop_strings_alone(
    engine: Engine, http: httpx.AsyncClient, stop: Any, detokenized: bool
) -> None:
    assert (await http.post(PATH, json=body(sampling_params={"max_tokens": 4, "stop": stop}))).status_code == 200
    assert engine.asked[0][1].detokenize is detokenized


async def test_spans_of_versions_are_told_where_the_engine_tells_them(engine: Engine, http: httpx.AsyncClient) -> None:
    spans = [SimpleNamespace(version="i0.v3", start=0, end=1), SimpleNamespace(version="i0.v4", start=1, end=2)]
    engine.outputs = [output(weight_versions=spans)]
    told = (await http.post(PATH, json=body())).json()["weight_versions"]
    assert told == [{"version": "i0.v3", "start": 0, "end": 1}, {"version": "i0.v4", "start": 1, "end": 2}]


async def test_a_request_may_fill_the_context(http: httpx.AsyncClient) -> None:
    assert (await http.post(PATH, json=body(token_ids=[5] * (CONTEXT - 4)))).status_code == 200


async def test_only_the_last_output_counts(engine: Engine, http: httpx.AsyncClient) -> None:
    engine.outputs = [output(token_ids=[7], logprobs=flat({7: -0.5}), finish_reason=None), output()]
    assert (await http.post(PATH, json=body())).json()["token_ids"] == [7, 8]


async def test_of_several_logprobs_at_a_position_the_sampled_tokens_is_told(
    engine: Engine, http: httpx.AsyncClient
) -> None:
    engine.outputs = [output(logprobs=flat({7: -0.5, 9: -0.25}, {8: -1.5}))]
    assert (await http.post(PATH, json=body())).json()["logprobs"] == [-0.5, -1.5]


@pytest.mark.parametrize("logprobs", [None, flat()])
async def test_what_is_aborted_in_the_queue_is_an_empty_answer(
    engine: Engine, http: httpx.AsyncClient, logprobs: Any
) -> None:
    engine.outputs = [output(token_ids=[], logprobs=logprobs, finish_reason="abort", weight_versions=[])]
    read = read_by_us((await http.post(PATH, json=body())).content)
    assert (read.token_ids, read.logprobs, read.spans, read.stop_reason) == ([], [], [], StopReason.ABORT)


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
async def test_a_logprob_that_is_no_number_is_told_and_never_trained(
    engine: Engine, http: httpx.AsyncClient, value: float
) -> None:
    engine.outputs = [output(logprobs=flat({7: -0.5}, {8: value}))]
    answer = await http.post(PATH, json=body())
    assert answer.json()["logprobs"] == [-0.5, None]
    with pytest.raises(ServerUnavailable, match="no number"):
        read_by_us(answer.content)


def read_by_us(content: bytes) -> Any:
    asked = GenerateBody(rid="r.1", input_ids=[5, 6], sampling=SamplingBody(max_new_tokens=4))
    return VllmDialect(ServerEpoch()).read(asked, content).output


async def test_one_id_may_be_asked_twice_at_once(engine: Engine, http: httpx.AsyncClient) -> None:
    """vLLM gives each an id of its own inside."""
    answers = await asyncio.gather(*(http.post(PATH, json=body()) for _ in range(2)))
    assert [answer.status_code for answer in answers] == [200, 200]


# -- refusals --


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": []}, "at least one"),
        ({"token_ids": ...}, "missing.*token_ids"),
        ({"token_ids": [5, -1]}, "token ids"),
        ({"token_ids": [5, 1.0]}, "token ids"),
        ({"token_ids": [5, True]}, "token ids"),
        ({"token_ids": "5"}, "token ids"),
        ({"token_ids": [5] * (CONTEXT - 3)}, f"4 behind {CONTEXT - 3} tokens; the context is {CONTEXT}"),
        ({"request_id": 1}, "request_id"),
        ({"request_id": "\ud800"}, "cannot be sent"),
        ({"cache_salt": 3}, "cache_salt"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"model": "policy"}, "model"),
        ({"sampling_params": [1]}, "an object"),
        ({"sampling_params": {}}, "max_tokens is missing"),
        ({"sampling_params": {"max_tokens": None}}, "None behind 2"),
        ({"sampling_params": {"max_tokens": "many"}}, "max_tokens: "),
        ({"sampling_params": {"max_tokens": 4, "stop_token_ids": ["x"]}}, "integer"),
        ({"sampling_params": {"max_tokens": 4, "stop_token_ids": [3, VOCABULARY]}}, rf"stop_token_ids: \[{VOCABULARY}"),
        ({"sampling_params": {"max_tokens": 4, "seed": 2**64}}, "cannot be sent"),
        ({"sampling_params": {"max_tokens": 4, "stop": ["\ud800"]}}, "cannot be sent"),
        ({"sampling_params": {"max_tokens": 4, "temperature": -1}}, "must be non-negative"),
        ({"sampling_params": {"max_tokens": 4, "tempreature": 1}}, "knows no tempreature"),
        ({"sampling_params": {"max_tokens": 4, "_eos_token_id": 1}}, "knows no _eos_token_id"),
        ({"sampling_params": {"max_tokens": 4, "n": 2, "logprobs": 5}}, "logprobs, n cannot be chosen"),
        ({"sampling_params": {"max_tokens": 4, "prompt_logprobs": 0}}, "prompt_logprobs cannot be chosen"),
    ],
)
async def test_what_can_never_succeed_is_a_400_and_never_reaches_the_engine(
    engine: Engine, http: httpx.AsyncClient, changes: dict[str, Any], words: str
) -> None:
    answer = await http.post(PATH, content=json.dumps(body(**changes)))
    assert answer.status_code == 400
    with pytest.raises(ValueError, match=words):
        raise ValueError(said(answer))
    assert engine.asked == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 100_000, b'{"token_ids": [1]}'])
async def test_what_is_no_request_is_a_400(engine: Engine, http: httpx.AsyncClient, content: bytes) -> None:
    answer = await http.post(PATH, content=content)
    assert answer.status_code == 400
    assert said(answer).startswith("the body is no request")
    assert engine.asked == []


async def test_a_huge_body_in_pieces_is_read_and_refused(http: httpx.AsyncClient) -> None:
    content = json.dumps(body(token_ids=[5] * 300_000)).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for begin in range(0, len(content), 65_536):
            yield content[begin : begin + 65_536]

    answer = await http.post(PATH, content=pieces())
    assert (answer.status_code, "300000 tokens" in said(answer)) == (400, True)


class EngineDeadError(Exception): ...


class EngineGenerateError(Exception): ...


def busy() -> Exception:
    error = Exception("the queue is full")
    error.http_status = HTTPStatus.SERVICE_UNAVAILABLE  # type: ignore[attr-defined]
    return error


def wrapped() -> Exception:
    error = EngineGenerateError()
    error.__cause__ = OverflowError("too wide")
    return error


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ValueError("Token id 700 is out of vocabulary"), 400, "out of vocabulary"),  # 0.26
        (VLLMClientError("Token id 700 is out of vocabulary"), 400, "out of vocabulary"),  # 0.32
        (busy(), 503, "queue is full"),
        (EngineDeadError("it encountered an issue"), 500, "EngineDeadError: it encountered an issue"),
        (wrapped(), 500, "too wide"),
    ],
)
async def test_an_engines_error_has_the_status_that_vllm_gives_it(
    engine: Engine, http: httpx.AsyncClient, error: Exception, status: int, words: str
) -> None:
    engine.error = error
    answer = await http.post(PATH, json=body())
    assert (answer.status_code, words in said(answer)) == (status, True)
    engine.error = None
    assert (await http.post(PATH, json=body())).status_code == 200


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ([], "without an answer"),
        ([SimpleNamespace(outputs=[])], "without an answer"),
        ([output(finish_reason="error")], "with an error"),
        ([output(logprobs=None)], "2 tokens with the log-probs of 0 others"),
        ([output(logprobs=flat({7: -0.5}))], "log-probs of 1 others"),
        ([output(logprobs=flat({7: -0.5}, {9: -1.5}))], "log-probs of 2 others"),
    ],
)
async def test_what_cannot_be_trusted_of_an_engine_is_a_500(
    engine: Engine, http: httpx.AsyncClient, outputs: list[SimpleNamespace], words: str
) -> None:
    engine.outputs = outputs
    answer = await http.post(PATH, json=body())
    assert (answer.status_code, words in said(answer)) == (500, True)


# -- clients that go --


async def test_a_client_that_goes_takes_its_request_with_it(engine: Engine, http: httpx.AsyncClient) -> None:
    engine.hangs = True
    content = json.dumps(body()).encode()
    writer = await connected(http)
    writer.write(raw(http, content, len(content)))
    await engine.began.wait()
    assert not engine.given_up.is_set()
    writer.close()
    await engine.given_up.wait()
    engine.hangs = False
    assert (await http.post(PATH, json=body())).status_code == 200


async def test_a_client_that_goes_in_mid_sentence_has_asked_nothing(engine: Engine, http: httpx.AsyncClient) -> None:
    writer = await connected(http)
    writer.write(raw(http, b'{"token_ids": [1', 1000))
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await http.post(PATH, json=body())).status_code == 200
    assert len(engine.asked) == 1


# -- the door --


async def test_the_path_tells_its_protocol(http: httpx.AsyncClient) -> None:
    answer = await http.get("/areal_like/generate")
    assert (answer.status_code, answer.json()) == (200, {"protocol": 1})


@pytest.mark.parametrize("method", ["PUT", "DELETE", "HEAD", "OPTIONS"])
async def test_other_methods_are_told_which_there_are(http: httpx.AsyncClient, method: str) -> None:
    answer = await http.request(method, PATH)
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, POST")


async def test_everything_asks_for_the_token_and_what_is_not_ours_goes_on(http: httpx.AsyncClient) -> None:
    assert (await http.get("/theirs")).json() == {"theirs": True}
    assert (await http.post(f"{PATH}/more", json=body())).status_code == 404
    for token in ("", "Bearer", "Bearer wrong", f"bearer {TOKEN}"):
        for method, path in (("POST", PATH), ("GET", PATH), ("GET", "/theirs")):
            answer = await http.request(method, path, headers={"Authorization": token})
            assert answer.status_code == 401


@pytest.mark.parametrize("path", [PATH, f"/behind{PATH}"])
async def test_it_is_found_behind_a_root_path_as_vllms_own_are(engine: Engine, path: str) -> None:
    async with served(engine, root_path="/behind") as http:
        assert (await http.post(path, json=body())).status_code == 200
        assert (await http.get(path.replace(PATH, "/theirs"))).status_code == 200


@pytest.mark.parametrize("scope", [{"type": "websocket", "path": PATH}, {"type": "lifespan"}])
async def test_what_is_no_http_is_vllms(scope: Scope) -> None:
    reached: list[Scope] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        reached.append(scope)

    async def nothing(*_: Message) -> Any:
        raise AssertionError("nobody may speak here")

    await TokenRoute(app)(scope, nothing, nothing)
    assert reached == [scope]
