"""The decode loop against plain transformers: whole-sequence forwards in float32, without a cache."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from areal_like.api.generation import StopReason
from areal_like.inference.embedded.loop import DecodeLoop

PROMPTS = [[3], [5, 9, 2, 40], [7] * 20, [11, 12], [30, 31, 32, 33, 34, 35, 36]]


def copy_weights(target: Any, source: Any) -> None:
    with torch.no_grad():
        for name, tensor in target.state_dict().items():
            tensor.copy_(source.state_dict()[name])


def greedy_continuation(model: Any, prompt: list[int], count: int) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def test_greedy_equals_transformers_generate(model: Any, make: Any, make_loop: Any, run: Any) -> None:
    requests = [make(p, greedy=True, max_new_tokens=12) for p in PROMPTS]
    run(make_loop(), *requests)
    for prompt, request in zip(PROMPTS, requests, strict=True):
        assert request.answers[0].tokens == greedy_continuation(model, prompt, 12)


@pytest.mark.parametrize(
    ("sampling", "processors"),
    [
        ({}, []),
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"temperature": 0.7, "top_p": 0.9}, [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)]),
    ],
)
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_logprobs_equal_a_plain_forward(
    model: Any, make: Any, make_loop: Any, run: Any, logprobs: Any, sampling: Any, processors: Any, kernel: str
) -> None:
    model.set_attn_implementation(kernel)
    requests = [make(p, seed=i, max_new_tokens=15, **sampling) for i, p in enumerate(PROMPTS)]
    run(make_loop(), *requests)
    for prompt, request in zip(PROMPTS, requests, strict=True):
        answer = request.answers[0]
        expected = logprobs(model, prompt, answer.tokens, *processors)
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-5)


def test_min_tokens_ban_stop_ids_and_the_logprobs_say_so(
    model: Any, make: Any, make_loop: Any, run: Any, logprobs: Any
) -> None:
    stops = list(range(1, 40))
    requests = [
        make(p, seed=i, min_new_tokens=6, max_new_tokens=20, stop_token_ids=tuple(stops), temperature=0.7)
        for i, p in enumerate(PROMPTS)
    ]
    run(make_loop(), *requests)
    for prompt, request in zip(PROMPTS, requests, strict=True):
        answer = request.answers[0]
        ban = MinNewTokensLengthLogitsProcessor(len(prompt), 6, stops, device="cpu")
        expected = logprobs(model, prompt, answer.tokens, ban, TemperatureLogitsWarper(0.7))
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-5)
        assert not set(answer.tokens[:6]) & set(stops)
        assert answer.stop_reason is StopReason.STOP and answer.tokens[-1] in stops


def test_frequency_penalty_counts_written_tokens(
    model: Any, make: Any, make_loop: Any, run: Any, logprobs: Any
) -> None:
    prompt = [5, 9]
    request = make(prompt, seed=1, frequency_penalty=1.5, max_new_tokens=20)
    run(make_loop(), request)

    def penalise(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(ids[0, len(prompt) :], minlength=scores.shape[-1])
        return scores - 1.5 * counts

    expected = logprobs(model, prompt, request.answers[0].tokens, penalise)
    np.testing.assert_allclose(request.answers[0].logprobs, expected, atol=1e-5)


def tokens_of(loop: DecodeLoop, run: Any, request: Any, *mates: Any) -> list[int]:
    run(loop, *mates, request)
    return list(request.answers[0].tokens)


def test_batch_mates_never_change_a_seeded_answer(make: Any, make_loop: Any, run: Any) -> None:
    def mine() -> Any:
        return make([5, 9, 2], seed=42, max_new_tokens=20, temperature=0.9)

    mates = [make(p, seed=i, max_new_tokens=3 + 4 * i, top_k=i) for i, p in enumerate(PROMPTS)]
    alone = tokens_of(make_loop(), run, mine())
    assert tokens_of(make_loop(), run, mine(), *mates) == alone

    late = make_loop()
    for mate in [make(p, max_new_tokens=30) for p in PROMPTS]:
        late.enqueue(mate)
    for _ in range(5):
        late.step(0, admit=True)
    assert tokens_of(late, run, mine()) == alone


def test_prompts_join_between_two_tokens(model: Any, make: Any, make_loop: Any, logprobs: Any) -> None:
    loop = make_loop(max_rows=4)
    requests = [make([3 + i, 4, 5][: 1 + i % 3], seed=i, max_new_tokens=1 + (5 * i) % 13) for i in range(14)]
    for request in requests:
        loop.enqueue(request)
        loop.step(0, admit=True)
    while loop.running or loop.queued:
        loop.step(0, admit=True)
    for request in requests:
        answer = request.answers[0]
        assert len(answer.tokens) == request.bounds.budget
        expected = logprobs(model, list(request.prompt), answer.tokens)
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-5)


def test_siblings_share_one_prefill_and_differ(model: Any, make: Any, make_loop: Any, run: Any, logprobs: Any) -> None:
    loop = make_loop()
    request = make([5, 6, 7], n=6, seed=3, max_new_tokens=10)
    run(loop, request)
    assert loop.counters.prompt_tokens == 3
    assert len({tuple(a.tokens) for a in request.answers}) == 6
    for answer in request.answers:
        np.testing.assert_allclose(answer.logprobs, logprobs(model, [5, 6, 7], answer.tokens), atol=1e-5)


def test_more_siblings_than_rows(make: Any, make_loop: Any, run: Any) -> None:
    wide, narrow = make([5, 6], n=7, seed=3), make([5, 6], n=7, seed=3)
    run(make_loop(), wide)
    run(make_loop(max_rows=2), narrow)
    assert [a.tokens for a in narrow.answers] == [a.tokens for a in wide.answers]


def test_answers_of_one_token_need_no_row(make: Any, make_loop: Any, run: Any) -> None:
    loop = make_loop(max_rows=1)
    requests = [make([i, 3], max_new_tokens=1) for i in range(2, 40)]
    run(loop, *requests)
    assert all(len(r.answers[0].tokens) == 1 for r in requests)
    assert loop.counters.decode_steps == 0
    assert loop.counters.prefills == 1
    assert loop.cache.nbytes == 0


def test_the_cache_limit_holds_prompts_back_but_never_one_alone(make: Any, make_loop: Any, run: Any) -> None:
    loop = make_loop(max_bytes=1)
    requests = [make([3, 4], max_new_tokens=6) for _ in range(3)]
    run(loop, *requests)
    assert loop.counters.decode_rows == loop.counters.decode_steps == 15


def test_budget_and_context_end_an_answer_as_length(make: Any, make_loop: Any, run: Any) -> None:
    short, full = make([3], max_new_tokens=4), make([3] * 50, max_new_tokens=1000)
    run(make_loop(), short, full)
    assert (len(short.answers[0].tokens), short.answers[0].stop_reason) == (4, StopReason.LENGTH)
    assert (len(full.answers[0].tokens), full.answers[0].stop_reason) == (14, StopReason.LENGTH)


def test_keep_goes_on_over_the_old_cache(
    model: Any, other_model: Any, make: Any, make_loop: Any, logprobs: Any
) -> None:
    old = copy.deepcopy(model)
    prompt = [5, 9, 2, 40]
    loop, request = make_loop(), make(prompt, seed=4, max_new_tokens=12)
    loop.enqueue(request)
    for _ in range(4):
        loop.step(0, admit=True)
    answer = request.answers[0]
    before = len(answer.tokens)
    copy_weights(model, other_model)
    while loop.running:
        loop.step(1, admit=True)

    # two phases by hand: old weights write the cache of everything but the last token, new ones read it
    ids = torch.tensor([[*prompt, *answer.tokens]])
    cut = len(prompt) + before - 1
    with torch.no_grad():
        cache = old(input_ids=ids[:, :cut], use_cache=True).past_key_values
        logits = other_model(input_ids=ids[:, cut:-1], past_key_values=cache).logits
    expected = torch.log_softmax(logits, -1)[0].gather(1, ids[0, cut + 1 :, None])[:, 0]
    np.testing.assert_allclose(answer.logprobs[before:], expected, atol=1e-5)
    fresh = logprobs(other_model, prompt, answer.tokens)[before:]
    assert np.abs(np.array(fresh) - answer.logprobs[before:]).max() > 0.01
    assert [(s["version"], s["start"], s["end"]) for s in answer.output()["spans"]] == [(0, 0, before), (1, before, 12)]


def test_recompute_goes_on_over_the_new_prefix(
    model: Any, other_model: Any, make: Any, make_loop: Any, logprobs: Any
) -> None:
    old = copy.deepcopy(model)
    loop = make_loop()
    requests = [make(p, seed=i, max_new_tokens=12) for i, p in enumerate(PROMPTS)]
    for request in requests:
        loop.enqueue(request)
        loop.step(0, admit=True)
    copy_weights(model, other_model)
    loop.recompute()
    while loop.running:
        loop.step(1, admit=True)
    for prompt, request in zip(PROMPTS, requests, strict=True):
        answer = request.answers[0]
        before = answer.output()["spans"][0]["end"]
        assert 0 < before < 12
        np.testing.assert_allclose(answer.logprobs[:before], logprobs(old, prompt, answer.tokens)[:before], atol=1e-5)
        fresh = logprobs(other_model, prompt, answer.tokens)[before:]
        np.testing.assert_allclose(answer.logprobs[before:], fresh, atol=1e-5)


def test_a_new_request_after_a_swap_sees_new_weights_only(
    model: Any, other_model: Any, make: Any, make_loop: Any, run: Any, logprobs: Any
) -> None:
    loop = make_loop()
    run(loop, *[make(p, seed=i) for i, p in enumerate(PROMPTS)])
    copy_weights(model, other_model)
    again = [make(p, seed=i, max_new_tokens=10) for i, p in enumerate(PROMPTS)]
    run(loop, *again, version=1)
    for prompt, request in zip(PROMPTS, again, strict=True):
        expected = logprobs(other_model, prompt, request.answers[0].tokens)
        np.testing.assert_allclose(request.answers[0].logprobs, expected, atol=1e-5)


def test_an_abort_answers_what_it_has_and_leaves_others_alone(make: Any, make_loop: Any, run: Any) -> None:
    loop = make_loop(max_rows=2)
    running, other, queued = (make(p, seed=1, max_new_tokens=9) for p in PROMPTS[:3])
    expected = tokens_of(make_loop(), run, make(PROMPTS[1], seed=1, max_new_tokens=9))
    for request in (running, other, queued):
        loop.enqueue(request)
    for _ in range(3):
        loop.step(0, admit=True)
    assert (loop.running, loop.queued) == (2, 1)
    assert loop.abort(lambda r: r is not other) == 2
    assert {id(r) for r in loop.take_finished()} == {id(running), id(queued)}
    assert len(running.answers[0].tokens) == 3  # one a round
    assert queued.answers[0].tokens == []
    assert {r.answers[0].output()["stop_reason"] for r in (running, queued)} == {StopReason.ABORT}
    while loop.running:
        loop.step(0, admit=True)
    assert other.answers[0].tokens == expected


def test_siblings_that_had_ended_keep_their_reason_at_an_abort(make: Any, make_loop: Any) -> None:
    loop = make_loop()
    request = make([5, 6], n=8, seed=2, max_new_tokens=30, stop_token_ids=tuple(range(2, 8)))
    loop.enqueue(request)
    while not any(a.stop_reason for a in request.answers):
        loop.step(0, admit=True)
    loop.abort(lambda r: True)
    reasons = {a.output()["stop_reason"] for a in request.answers}
    assert reasons == {StopReason.STOP, StopReason.ABORT}


def test_no_joining_while_it_is_not_admitted(make: Any, make_loop: Any) -> None:
    loop = make_loop()
    loop.enqueue(make([3]))
    loop.step(0, admit=False)
    assert (loop.running, loop.queued) == (0, 1)


def test_weights_that_give_nan_fail_the_request_and_not_the_next(
    model: Any, other_model: Any, make: Any, make_loop: Any, run: Any, logprobs: Any
) -> None:
    loop = make_loop()
    long, short = make([5, 6, 7], max_new_tokens=30), make([8, 9], max_new_tokens=30)
    for request in (long, short):
        loop.enqueue(request)
        loop.step(0, admit=True)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    while loop.running:
        loop.step(1, admit=True)
    assert all("version 1 gave logits that are not finite" in r.error for r in (long, short))
    copy_weights(model, other_model)
    later = make([8, 9], seed=1, max_new_tokens=30)
    run(loop, later, version=2)
    assert later.error == ""
    np.testing.assert_allclose(
        later.answers[0].logprobs, logprobs(other_model, [8, 9], later.answers[0].tokens), atol=1e-5
    )


def test_counters_add_up(make: Any, make_loop: Any, run: Any) -> None:
    loop = make_loop()
    requests = [make([i, 3, 4], max_new_tokens=1 + i) for i in range(2, 9)]
    run(loop, *requests)
    counted = loop.counters
    assert counted.generated_tokens == sum(r.bounds.budget for r in requests)
    assert counted.generated_tokens == counted.decode_rows + len(requests)
    assert counted.prompt_tokens == 3 * len(requests)
    assert counted.finished_requests == len(requests)
