"""What every engine promises about one answer (DESIGN.md, section 5)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from statistics import fmean
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import pytest_asyncio
from subjects import HUNG, TEST, ServerProcess

from areal_like.api.generation import StopReason
from areal_like.errors import RequestError

if TYPE_CHECKING:
    from conftest import Line

pytestmark = [pytest.mark.timeout(TEST), pytest.mark.asyncio(loop_scope="module")]

PROMPT = [10, 200, 31, 77, 150, 42]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def line(open_line: Any, server: ServerProcess) -> AsyncIterator[Line]:
    """One version for all: nothing is published here, and publishing takes seconds."""
    async with open_line(server) as opened:
        yield opened


async def test_logprobs_are_those_of_the_distribution_sampled_from(line: Line) -> None:
    answer = await line.ask(PROMPT, max_new_tokens=48, temperature=0.7)
    assert answer.output_len == 48
    found = line.distance(answer, line.version, temperature=0.7)
    assert found < line.subject.noise
    assert line.distance(answer, line.version, temperature=1.0) > 3 * found


async def test_for_evaluation_top_p_is_in_the_logprobs_too(line: Line) -> None:
    """A token at the nucleus' edge may lie outside it in other arithmetic: nearly all must agree, not all."""
    answer = await line.ask(PROMPT, max_new_tokens=48, temperature=1.0, top_p=0.9)
    within = [d for d in line.differences(answer, line.version, temperature=1.0, top_p=0.9) if math.isfinite(d)]
    assert len(within) >= 43
    assert fmean(within) < line.subject.noise
    assert fmean(within) < line.distance(answer, line.version, temperature=1.0)


async def test_a_greedy_answers_logprobs_are_the_models_own(line: Line) -> None:
    """At temperature 1: there is no distribution that it was sampled from."""
    answer = await line.ask(PROMPT, max_new_tokens=16, greedy=True)
    assert line.distance(answer, line.version, temperature=1.0) < line.subject.noise


async def test_the_budget_ends_an_answer(line: Line) -> None:
    answer = await line.ask(PROMPT, max_new_tokens=5)
    assert (answer.output_len, answer.stop_reason) == (5, StopReason.LENGTH)
    assert len(answer.output_logprobs) == len(answer.output_versions) == 5
    assert set(answer.output_versions) == {line.version}


async def test_the_context_is_a_budget_too(line: Line) -> None:
    room = 6
    context = line.pool.context_length
    assert context is not None
    answer = await line.ask([11] * (context - room), max_new_tokens=50)
    assert (answer.output_len, answer.stop_reason) == (room, StopReason.LENGTH)


async def test_a_stop_id_ends_an_answer_and_stays_in_it(line: Line) -> None:
    free = await line.ask(PROMPT, max_new_tokens=12, greedy=True)
    stop = free.output_tokens[5]
    first = free.output_tokens.index(stop)
    answer = await line.ask(PROMPT, max_new_tokens=12, greedy=True, stop_token_ids=(stop,))
    assert answer.stop_reason is StopReason.STOP
    assert answer.output_tokens == free.output_tokens[: first + 1]


async def test_no_stop_before_the_minimum(line: Line) -> None:
    free = await line.ask(PROMPT, max_new_tokens=12, greedy=True)
    answer = await line.ask(
        PROMPT, max_new_tokens=12, min_new_tokens=9, greedy=True, stop_token_ids=(free.output_tokens[0],)
    )
    assert answer.output_len >= 9


async def test_a_stop_string_ends_an_answer_and_is_trimmed(line: Line, tokenizer: Any) -> None:
    """The token in which it begins stays if it also carries text before it, and with it what else it carries."""
    free = await line.ask(PROMPT, max_new_tokens=16, greedy=True)
    texts = [tokenizer.decode(free.output_tokens[:count]) for count in range(17)]
    stop = plain(texts[16])
    answer = await line.ask(PROMPT, max_new_tokens=16, greedy=True, stop=(stop,))
    begin = texts[16].index(stop)
    kept = next(count for count, text in enumerate(texts) if len(text.rstrip("\ufffd")) >= begin)
    assert answer.stop_reason is StopReason.STOP
    assert answer.output_tokens == free.output_tokens[:kept]
    assert answer.output_len < free.output_len


def plain(text: str) -> str:
    """Three characters from the middle of ``text``, or from behind it, none of which is half of something."""
    places = range(len(text) // 2, len(text) - 2)
    return next(text[place : place + 3] for place in places if "\ufffd" not in text[place : place + 3])


async def test_a_seed_repeats_an_answer_and_another_does_not(line: Line) -> None:
    """Where the engine's capabilities say that seeds are not honoured here, that is true, and they do no harm."""
    first = await line.ask(PROMPT, max_new_tokens=16, seed=7)
    again = await line.ask(PROMPT, max_new_tokens=16, seed=7)
    if not line.subject.seeds:
        assert first.output_tokens != again.output_tokens  # else they are: say so
        return
    other = await line.ask(PROMPT, max_new_tokens=16, seed=8)
    assert first.output_tokens == again.output_tokens
    assert first.output_tokens != other.output_tokens


async def test_a_long_seeded_prompt_does_no_harm(line: Line) -> None:
    """vLLM on a CPU dies of a seed with a prompt that is prefilled in chunks."""
    assert line.pool.context_length is not None
    prompt = [(7 * i) % 290 + 5 for i in range(line.pool.context_length - 20)]
    answers = await asyncio.gather(
        *(line.ask(prompt, max_new_tokens=4, seed=i) for i in range(6 if line.subject.seeds else 2))
    )
    assert {answer.output_len for answer in answers} == {4}


async def test_what_can_never_succeed_is_refused_at_once(line: Line) -> None:
    assert line.pool.context_length is not None
    with pytest.raises(RequestError, match="leaves no room"):
        await line.ask([11] * line.pool.context_length, max_new_tokens=1)
    with pytest.raises(RequestError):
        await line.ask([10_000_000], max_new_tokens=1)
    answer = await line.ask(PROMPT, max_new_tokens=2)
    assert answer.output_len == 2


async def test_many_at_once(line: Line) -> None:
    prompts = [[*PROMPT, 5 + i] for i in range(256)]
    answers = await asyncio.gather(*(line.ask(prompt, max_new_tokens=4) for prompt in prompts))
    assert [answer.input_tokens for answer in answers] == prompts
    assert {answer.output_len for answer in answers} == {4}
    assert fmean(line.distance(answer, line.version) for answer in answers[::16]) < line.subject.noise


async def test_an_answer_that_is_cut_goes_on_where_it_ended(line: Line) -> None:
    """By the id that the engine knows the request by; a wrong one would be answered 200, and cut nothing."""
    most = line.subject.long
    asked = asyncio.create_task(line.ask(PROMPT, max_new_tokens=most, rid="cut-in-the-middle"))
    await line.in_hand()
    await line.link.control.abort(["cut-in-the-middle.1"], timeout=HUNG)
    answer = await asked
    assert (answer.output_len, answer.interruptions, answer.stop_reason) == (most, 1, StopReason.LENGTH)
    assert set(answer.output_versions) == {line.version}
    assert line.distance(answer, line.version) < line.subject.noise


async def test_an_answer_that_nobody_waits_for_is_given_up(line: Line) -> None:
    """Its tokens would be written for nobody: it is over while a shorter one beside it is still written."""
    abandoned, other = (
        asyncio.create_task(line.ask(PROMPT, max_new_tokens=n)) for n in (line.subject.longest, line.subject.long)
    )
    await line.in_hand(2)
    abandoned.cancel()
    async with asyncio.timeout(HUNG):
        while (await line.link.control.health(timeout=HUNG)).in_flight > 1:  # noqa: ASYNC110  # another process
            await asyncio.sleep(0.01)
    assert not other.done()
    assert (await other).output_len == line.subject.long
    assert abandoned.cancelled()


async def test_without_the_token_nothing_is_answered(line: Line) -> None:
    async with httpx.AsyncClient(base_url=line.server.url, trust_env=False, timeout=HUNG) as http:
        for path in (
            "/generate", "/areal_like/generate", "/v1/completions", "/inference/v1/generate", "/pause", "/resume",
            "/update_weights", "/collective_rpc",
        ):  # fmt: skip
            assert (await http.post(path, json={})).status_code == 401, path
    assert (await line.ask(PROMPT, max_new_tokens=1)).output_len == 1
