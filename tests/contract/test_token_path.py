"""Our path in vLLM's API server answers what vLLM's own answers, from the same engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import pytest_asyncio
from subjects import HUNG, TEST, TOKEN, ServerProcess, Subject

from areal_like.inference.backends.vllm_dialect import MODEL_NAME
from areal_like.inference.token_path import PATH

if TYPE_CHECKING:
    from conftest import Line

pytestmark = [pytest.mark.engines, pytest.mark.timeout(TEST), pytest.mark.asyncio(loop_scope="module")]

PROMPT = [10, 200, 31, 77, 150, 42]


@pytest.fixture(scope="module")
def parts(request: pytest.FixtureRequest, subject: Subject) -> tuple[Any, ServerProcess]:
    """Skips before a server of another engine is started for nothing."""
    if subject.name != "vllm":
        pytest.skip("the path is in vLLM servers alone")
    return request.getfixturevalue("open_line"), request.getfixturevalue("server")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def line(parts: tuple[Any, ServerProcess]) -> AsyncIterator[Line]:
    open_line, server = parts
    async with open_line(server) as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(line: Line) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=line.server.url, headers=headers, trust_env=False, timeout=HUNG) as client:
        yield client


async def ours(http: httpx.AsyncClient, **sampling: Any) -> httpx.Response:
    asked = {"request_id": "r", "token_ids": PROMPT, "sampling_params": sampling, "cache_salt": "ours"}
    return await http.post(PATH, content=json.dumps(asked))


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 7},
        {"temperature": 1.0, "top_p": 0.9, "seed": 7},
        {"temperature": 0.0, "min_tokens": 12, "stop_token_ids": list(range(40, 300))},
    ],
)
async def test_our_path_answers_what_the_engines_own_answers(http: httpx.AsyncClient, sampling: dict[str, Any]) -> None:
    """Each alone in its batch, and without each other's prefix: the same tokens from the same arithmetic."""
    sampling = {"max_tokens": 24, **sampling}
    asked = {**sampling, "model": MODEL_NAME, "prompt": PROMPT, "logprobs": 0, "return_token_ids": True}
    theirs = (await http.post("/v1/completions", json={**asked, "cache_salt": "theirs"})).json()["choices"][0]
    found = (await ours(http, **sampling)).json()
    assert found["token_ids"] == theirs["token_ids"]
    assert found["logprobs"] == pytest.approx(theirs["logprobs"]["token_logprobs"], abs=1e-5)
    assert found["finish_reason"] == theirs["finish_reason"]


async def test_a_stop_string_ends_an_answer_where_the_engines_own_path_does(
    http: httpx.AsyncClient, tokenizer: Any
) -> None:
    free = (await ours(http, max_tokens=24, temperature=0.0)).json()["token_ids"]
    stop = next(text for text in map(tokenizer.decode, free[4:]) if text.strip() and "\ufffd" not in text)
    sampling = {"max_tokens": 24, "temperature": 0.0, "stop": [stop], "include_stop_str_in_output": True}
    asked = {**sampling, "model": MODEL_NAME, "prompt": PROMPT, "logprobs": 0, "return_token_ids": True}
    theirs = (await http.post("/v1/completions", json={**asked, "cache_salt": "theirs"})).json()["choices"][0]
    found = (await ours(http, **sampling)).json()
    assert (found["token_ids"], found["finish_reason"]) == (theirs["token_ids"], "stop")
    assert found["logprobs"] == pytest.approx(theirs["logprobs"]["token_logprobs"], abs=1e-5)


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"temperature": 0.5}, "max_tokens is missing"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": "many"}, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": 100_000}, "the context is"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens must be less than or equal to"),
        ({"max_tokens": 4, "temperature": float("nan")}, "temperature"),
        ({"max_tokens": 4, "temperature": -1.0}, "temperature must be non-negative"),
        ({"max_tokens": 4, "top_p": 2.0}, "top_p must be in"),
        ({"max_tokens": 4, "top_k": 1.5}, "top_k: Input should be a valid integer"),
        ({"max_tokens": 4, "stop": [""]}, "stop cannot contain an empty string"),
        ({"max_tokens": 4, "stop": ["\ud800"]}, "surrogates not allowed"),
        ({"max_tokens": 4, "stop_token_ids": [10_000_000]}, "the vocabulary is"),
        ({"max_tokens": 4, "stop_token_ids": ["x"]}, "Input should be a valid integer"),
        ({"max_tokens": 4, "seed": 2**64}, "cannot be sent"),
        ({"max_tokens": 4, "seed": "x"}, "seed: Input should be a valid integer"),
        ({"max_tokens": 4, "logit_bias": {"10000000": 1.0}}, "vocab"),
        ({"max_tokens": 4, "nothing_like_it": 1}, "knows no nothing_like_it"),
        ({"max_tokens": 4, "n": 2}, "n cannot be chosen here"),
    ],
)
async def test_sampling_parameters_that_cannot_be_had_are_refused_and_do_no_harm(
    http: httpx.AsyncClient, sampling: dict[str, Any], said: str
) -> None:
    """With 400, before the engine hears of them: what it cannot read ends it."""
    answer = await ours(http, **sampling)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert (await ours(http, max_tokens=1)).status_code == 200


@pytest.mark.parametrize("ids", [[10_000_000], [2**70], [-1], []])
async def test_ids_that_do_not_exist_are_refused_and_do_no_harm(http: httpx.AsyncClient, ids: list[int]) -> None:
    asked = {"request_id": "r", "token_ids": ids, "sampling_params": {"max_tokens": 1}}
    assert (await http.post(PATH, content=json.dumps(asked))).status_code == 400
    assert (await ours(http, max_tokens=1)).status_code == 200
