"""What a vLLM server of ours is asked at our path (``test_token_route.py``), and what of its answers is believed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from areal_like.api.generation import StopReason
from areal_like.api.wire import GenerateBody, SamplingBody, VersionSpan
from areal_like.errors import RequestError, ServerBusy, ServerUnavailable
from areal_like.inference.backends.epoch import ServerEpoch
from areal_like.inference.backends.vllm_dialect import CutDialect, VllmDialect
from areal_like.inference.token_path import PATH


def epoch_at(version: int) -> ServerEpoch:
    epoch = ServerEpoch()
    epoch.end(0, version)
    return epoch


def body(**sampling: Any) -> GenerateBody:
    return GenerateBody(rid="r.1", input_ids=[5, 6], sampling=SamplingBody(**{"max_new_tokens": 4, **sampling}))


def answer(**changes: Any) -> bytes:
    whole = {
        "token_ids": [7, 8],
        "logprobs": [-0.5, -1.5],
        "finish_reason": "length",
        "weight_versions": [{"version": "i0.v3", "start": 0, "end": 1}, {"version": "i0.v4", "start": 1, "end": 2}],
        **changes,
    }
    return json.dumps(whole).encode()


def test_every_sampling_parameter_is_sent() -> None:
    call = VllmDialect(epoch_at(3)).generate(body(temperature=0.7, top_k=5, stop=("x",), seed=2**64 - 1))
    sent = json.loads(call.content)
    params = sent["sampling_params"]
    assert (params["max_tokens"], params["temperature"], params["top_k"], params["stop"]) == (4, 0.7, 5, ["x"])
    assert (params["top_p"], params["min_p"], params["repetition_penalty"]) == (1.0, 0.0, 1.0)
    assert 0 <= params["seed"] < 2**63
    assert (call.path, sent["token_ids"], sent["request_id"]) == (PATH, [5, 6], "r.1")


def test_greedy_is_temperature_zero() -> None:
    for asked in (body(greedy=True), body(temperature=0.0)):
        assert json.loads(VllmDialect(epoch_at(0)).generate(asked).content)["sampling_params"]["temperature"] == 0.0


def test_a_temperature_that_vllm_would_change_is_refused() -> None:
    with pytest.raises(RequestError, match=r"samples with 0\.01 instead"):
        VllmDialect(epoch_at(0)).generate(body(temperature=0.001))


def test_seeds_are_left_out_where_they_would_end_the_server() -> None:
    epoch = epoch_at(0)
    epoch.seeds = False
    sent = json.loads(VllmDialect(epoch).generate(body(seed=3)).content)
    assert sent["sampling_params"]["seed"] is None


def test_tokens_logprobs_and_spans_come_back() -> None:
    output = VllmDialect(epoch_at(4)).read(body(), answer()).output
    assert (output.token_ids, output.logprobs, output.stop_reason) == ([7, 8], [-0.5, -1.5], StopReason.LENGTH)
    assert output.spans == [VersionSpan(version=3, start=0, end=1), VersionSpan(version=4, start=1, end=2)]


def test_an_abort_in_the_queue_is_an_empty_segment() -> None:
    output = (
        VllmDialect(epoch_at(4))
        .read(body(), answer(token_ids=[], logprobs=[], weight_versions=None, finish_reason="abort"))
        .output
    )
    assert (output.token_ids, output.spans, output.stop_reason) == ([], [], StopReason.ABORT)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight_versions": [{"version": "default", "start": 0, "end": 2}]}, "labelled 'default'"),
        ({"logprobs": [-0.5]}, "2 tokens came with 1 log-probs"),
        ({"logprobs": [-0.5, None]}, "no number"),
        ({"logprobs": None}, "breaks our schema"),
        ({"finish_reason": "error"}, "ended with 'error'"),
        ({"finish_reason": None}, "ended with None"),
        ({"token_ids": "none"}, "breaks our schema"),
    ],
)
def test_an_answer_that_cannot_be_trusted_is_not_trained(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ServerUnavailable, match=said):
        VllmDialect(epoch_at(4)).read(body(), answer(**changes))


@pytest.mark.parametrize("dialect", [VllmDialect, CutDialect])
def test_a_request_is_aborted_under_the_id_it_was_asked_with(dialect: type[VllmDialect | CutDialect]) -> None:
    made = dialect(epoch_at(0))
    asked, aborted = made.generate(body()), made.abort("r.1")
    assert aborted.path == "/abort_requests"
    assert json.loads(aborted.content) == {"request_ids": [json.loads(asked.content)["request_id"]]}


def test_no_salt_is_shared_across_an_update() -> None:
    epoch = epoch_at(3)
    dialect = VllmDialect(epoch)

    def salt(rid: str) -> str:
        request = GenerateBody(rid=rid, input_ids=[5], sampling=SamplingBody(max_new_tokens=1))
        return str(json.loads(dialect.generate(request).content)["cache_salt"])

    before = {salt("a"), salt("b")}
    epoch.begin()
    during = {salt("c"), salt("d")}
    epoch.end(0, 4)
    after = {salt("e"), salt("f")}
    assert (len(before), len(during), len(after)) == (1, 2, 1)
    assert not before & during and not during & after and not before & after


def unspanned(finish_reason: str = "stop") -> bytes:
    return answer(finish_reason=finish_reason, weight_versions=None)


def test_without_spans_an_answer_is_of_the_version_it_was_posted_under() -> None:
    dialect = CutDialect(epoch_at(3))
    call = dialect.generate(body())
    assert call == VllmDialect(epoch_at(3)).generate(body())
    assert dialect.read(body(), unspanned()).output.spans == [VersionSpan(version=3, start=0, end=2)]


def test_without_spans_an_answer_that_an_update_cut_is_of_the_version_before() -> None:
    epoch = epoch_at(3)
    dialect = CutDialect(epoch)
    dialect.generate(body())
    epoch.begin()
    epoch.end(0, 4)
    output = dialect.read(body(), unspanned("abort")).output
    assert (output.spans, output.stop_reason) == ([VersionSpan(version=3, start=0, end=2)], StopReason.ABORT)


@pytest.mark.parametrize("finish_reason", ["stop", "abort"])
def test_without_spans_an_answer_that_came_through_an_update_unseen_is_not_guessed(finish_reason: str) -> None:
    """Posted just before one update and read by the server just after it, then cut by the next one."""
    epoch = epoch_at(3)
    dialect = CutDialect(epoch)
    dialect.generate(body())
    for version in (4, 5):
        epoch.begin()
        epoch.load()
        epoch.end(0, version)
    with pytest.raises(ServerUnavailable, match="which version wrote it"):
        dialect.read(body(), unspanned(finish_reason))


def test_without_spans_an_answer_that_nobody_asked_for_is_not_guessed() -> None:
    with pytest.raises(ServerUnavailable, match="which version wrote it"):
        CutDialect(epoch_at(3)).read(body(), unspanned("abort"))


@pytest.mark.parametrize("withdrawn", [False, True])
def test_without_spans_an_answer_that_comes_before_loading_is_of_the_version_before(withdrawn: bool) -> None:
    """A drain waits for it; an update that is given up before it loads has changed nothing."""
    epoch = epoch_at(3)
    dialect = CutDialect(epoch)
    dialect.generate(body())
    epoch.begin()
    if withdrawn:
        epoch.withdraw()
    assert dialect.read(body(), unspanned()).output.spans == [VersionSpan(version=3, start=0, end=2)]


@pytest.mark.parametrize("ended", [False, True])
def test_without_spans_an_answer_across_an_update_is_not_guessed(ended: bool) -> None:
    epoch = epoch_at(3)
    dialect = CutDialect(epoch)
    dialect.generate(body())
    assert not dialect.closed()
    epoch.begin()
    assert dialect.closed()
    with pytest.raises(ServerBusy, match=dialect.closed()):
        dialect.generate(body())
    epoch.load()
    if ended:
        epoch.end(0, 4)
        assert not dialect.closed()
    with pytest.raises(ServerUnavailable, match="which version wrote it"):
        dialect.read(body(), unspanned())
