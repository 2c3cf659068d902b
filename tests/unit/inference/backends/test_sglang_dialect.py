"""What SGLang is asked, and what of its answers is believed. Answers as a real server of 0.5.23 wrote them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from areal_like.api.generation import StopReason
from areal_like.api.wire import GenerateBody, SamplingBody, VersionSpan
from areal_like.errors import RequestError, ServerBusy, ServerUnavailable
from areal_like.inference.backends.sglang_dialect import SglangDialect
from areal_like.inference.backends.sglang_server import ServerFacts, ServerState
from areal_like.weights.checkpoint import Expected


def dialect(version: int = 3, **changes: Any) -> SglangDialect:
    facts = {
        "context_length": 100, "vocabulary": 50, "device": "cpu", "ranks": 1, "pipeline": 1, "dtype": "float32",
        "overlapped": False, "filtered_tokens": 4096, "expected": Expected(shapes={}, optional={}), **changes,
    }  # fmt: skip
    state = ServerState(facts=ServerFacts(**facts))
    state.epoch.end(0, version)
    return SglangDialect(state)


def body(**sampling: Any) -> GenerateBody:
    return GenerateBody(rid="r.1", input_ids=[5, 6], sampling=SamplingBody(**{"max_new_tokens": 4, **sampling}))


def sent(asked: GenerateBody, **facts: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(dialect(**facts).generate(asked).content)
    return content


def answer(**meta: Any) -> bytes:
    known = {
        "id": "r.1",
        "finish_reason": {"type": "length", "length": 2},
        "output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None]],
        "weight_versions": [{"version": "i0.v3", "start": 0, "end": 1}, {"version": "i0.v4", "start": 1, "end": 2}],
    }
    return json.dumps({"text": "ab", "output_ids": [7, 8], "meta_info": {**known, **meta}}).encode()


def test_every_sampling_parameter_is_sent() -> None:
    content = sent(body(temperature=0.7, stop=("x",), stop_token_ids=(9,), seed=2**64 - 1))
    params = content["sampling_params"]
    assert (content["input_ids"], content["rid"], content["return_logprob"]) == ([5, 6], "r.1", True)
    assert (params["max_new_tokens"], params["min_new_tokens"], params["temperature"]) == (4, 0, 0.7)
    assert (params["stop"], params["stop_token_ids"], params["ignore_eos"]) == (["x"], [9], False)
    assert (params["top_p"], params["top_k"], params["min_p"], params["repetition_penalty"]) == (1.0, -1, 0.0, 1.0)
    assert 0 <= params["sampling_seed"] < 2**63
    assert "return_sampling_mask" not in content


def test_a_server_that_samples_by_seeds_gets_one_for_every_request() -> None:
    """Otherwise all that have none, such as the siblings of a group, would be the same answer."""
    assert sent(body())["sampling_params"]["sampling_seed"] is None
    unseeded = [
        sent(body().model_copy(update={"rid": rid}), deterministic=True)["sampling_params"]["sampling_seed"]
        for rid in ("r.1", "r.2", "r.1")
    ]
    assert unseeded[0] == unseeded[2] != unseeded[1]
    assert sent(body(seed=7), deterministic=True)["sampling_params"]["sampling_seed"] == 7
    with pytest.raises(RequestError, match=r"min_p: a server with sglang\.enable_deterministic_inference"):
        sent(body(min_p=0.1), deterministic=True)


def test_a_filtered_distribution_is_asked_for_with_its_logprobs() -> None:
    content = sent(body(top_p=0.9))
    assert content["return_sampling_mask"]
    assert content["sampling_params"]["top_k"] == 4000
    assert sent(body(top_k=5))["sampling_params"]["top_k"] == 5
    found = dialect(4).read(body(top_p=0.9), answer(output_token_sampling_logprobs=[-0.4, -1.2]))
    assert found.output.logprobs == [-0.4, -1.2]


def test_a_filter_whose_logprobs_cannot_be_told_is_refused() -> None:
    with pytest.raises(RequestError, match=r"SGLang >= 0\.5\.21"):
        sent(body(top_p=0.9), filtered_tokens=0)
    with pytest.raises(RequestError, match="top_k 4500: the server tells log-probs of at most 4000"):
        sent(body(top_k=4500))
    with pytest.raises(ServerUnavailable, match="0 log-probs of the filtered distribution"):
        dialect().read(body(top_p=0.9), answer())


def test_greedy_needs_no_filter() -> None:
    for asked in (body(greedy=True, top_p=0.5), body(temperature=0.0)):
        content = sent(asked)
        assert content["sampling_params"]["temperature"] == 0.0
        assert "return_sampling_mask" not in content


def test_an_id_that_would_end_the_server_is_refused() -> None:
    asked = GenerateBody(rid="r", input_ids=[5, 50], sampling=SamplingBody(max_new_tokens=1))
    with pytest.raises(RequestError, match="token id 50 is outside the model's vocabulary of 50"):
        sent(asked)


def test_what_sglang_would_change_is_refused() -> None:
    with pytest.raises(RequestError, match="takes it for greedy"):
        sent(body(temperature=1e-7))
    with pytest.raises(RequestError, match="at most 32"):
        sent(body(stop=tuple(map(str, range(33)))))


def test_nothing_is_posted_while_a_drain_waits_or_before_it_was_asked() -> None:
    state = ServerState()
    with pytest.raises(ServerBusy, match="not asked yet"):
        SglangDialect(state).generate(body())
    closed = dialect()
    closed._state.closed = True
    with pytest.raises(ServerBusy, match="waits until"):
        closed.generate(body())


def test_requests_of_one_version_share_a_prefix_and_those_of_two_do_not() -> None:
    assert sent(body(), version=3)["cache_salt"] == sent(body(), version=3)["cache_salt"]
    assert sent(body(), version=3)["cache_salt"] != sent(body(), version=4)["cache_salt"]
    updating = dialect(3)
    updating._state.epoch.begin()
    assert json.loads(updating.generate(body()).content)["cache_salt"] == "r.1.alone"


def test_spans_and_logprobs_are_read() -> None:
    output = dialect(4).read(body(), answer()).output
    assert (output.token_ids, output.logprobs) == ([7, 8], [-0.5, -1.5])
    assert output.spans == [VersionSpan(version=3, start=0, end=1), VersionSpan(version=4, start=1, end=2)]


@pytest.mark.parametrize(
    ("finish", "sampling", "reason"),
    [
        ({"type": "length", "length": 2}, {"max_new_tokens": 2}, StopReason.LENGTH),
        ({"type": "stop", "matched": 8}, {}, StopReason.STOP),
        ({"type": "stop", "matched": "b"}, {"stop": ("b",)}, StopReason.STOP),
        ({"type": "stop", "matched": 8}, {"ignore_eos": True, "stop_token_ids": (8,)}, StopReason.STOP),
        ({"type": "stop", "matched": 8}, {"ignore_eos": True, "stop_token_ids": (9,)}, StopReason.ABORT),
        ({"type": "length", "length": 2}, {"min_new_tokens": 2}, StopReason.ABORT),
        ({"type": "abort", "message": "Aborted"}, {}, StopReason.ABORT),
    ],
)
def test_what_only_sglang_takes_for_an_end_is_a_cut(
    finish: dict[str, Any], sampling: dict[str, Any], reason: StopReason
) -> None:
    assert dialect(4).read(body(**sampling), answer(finish_reason=finish)).output.stop_reason is reason


def test_stop_strings_are_asked_for_after_the_minimum() -> None:
    """SGLang's own minimum does not hold them back."""
    first = sent(body(stop=("x",), stop_token_ids=(9,), min_new_tokens=3))["sampling_params"]
    assert (first["stop"], first["max_new_tokens"], first["min_new_tokens"], first["stop_token_ids"]) == (
        None,
        3,
        3,
        [9],
    )
    then = sent(body(stop=("x",), stop_token_ids=(9,)))["sampling_params"]
    assert (then["stop"], then["max_new_tokens"], then["min_new_tokens"]) == (["x"], 4, 0)


def test_stop_ids_without_the_end_token() -> None:
    """SGLang's ``ignore_eos`` ignores them as well; its minimum bans the end token all the same."""
    plain = sent(body(ignore_eos=True, min_new_tokens=2))["sampling_params"]
    assert (plain["ignore_eos"], plain["min_new_tokens"], plain["max_new_tokens"]) == (True, 0, 4)
    stops = sent(body(ignore_eos=True, stop_token_ids=(9,)))["sampling_params"]
    assert (stops["ignore_eos"], stops["stop_token_ids"]) == (False, [9])
    first = sent(body(ignore_eos=True, stop_token_ids=(9,), min_new_tokens=3))["sampling_params"]
    assert (first["ignore_eos"], first["max_new_tokens"], first["min_new_tokens"]) == (True, 3, 0)
    assert first["logit_bias"] == {"9": -1e9}


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        ({"output_token_logprobs": [[-0.5, 7, None]]}, "2 tokens came with the log-probs of 1 others"),
        ({"output_token_logprobs": [[-0.5, 7, None], [-1.0, 9, None]]}, "log-probs of 2 others"),
        ({"output_token_logprobs": [[-0.5, 7, None], [None, 8, None]]}, "a log-prob is missing"),
        ({"finish_reason": None}, "no way for an answer to end"),
        ({"finish_reason": {"type": "odd"}}, "no way for an answer to end"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 2}]}, "labelled 'default'"),
    ],
)
def test_an_answer_that_cannot_be_trusted_is_no_answer(meta: dict[str, Any], said: str) -> None:
    with pytest.raises(ServerUnavailable, match=said):
        dialect().read(body(), answer(**meta))


def test_what_was_never_updated_may_answer_when_it_is_served_as_loaded() -> None:
    served = dialect(0)
    served._state.as_loaded = True
    spans = [{"version": "default", "start": 0, "end": 2}]
    assert served.read(body(), answer(weight_versions=spans)).output.spans == [VersionSpan(version=0, start=0, end=2)]


def test_a_broken_answer() -> None:
    with pytest.raises(ServerUnavailable, match="breaks SGLang's schema"):
        dialect().read(body(), b"{}")


def test_abort_names_the_request() -> None:
    call = dialect().abort("r.1")
    assert (call.path, json.loads(call.content)) == ("/abort_request", {"rid": "r.1"})
