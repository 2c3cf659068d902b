"""Answers with a tail: what is trained ends with the answer, and the engine's work does not."""

from __future__ import annotations

from typing import Any

import pytest

from areal_like.api import GenerationHyperparameters, Tokenizer
from areal_like.rollout.convert import to_trajectories
from workflows.long_tail import LongTailWorkflow

GCONFIG = GenerationHyperparameters(n_samples=2, max_new_tokens=6, min_new_tokens=1, temperature=0.7)


async def reward_of(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    """1 for the answer "ab" and its end alone."""
    return float((completions, completion_ids, data["answer"]) == ("ab", [2, 3, 1], "x"))


async def test_the_tail_is_context_and_the_answer_is_what_is_rewarded(letters: Tokenizer, scripted: Any) -> None:
    engine = scripted([[2, 3, 1, 2, 1]])
    row = await LongTailWorkflow(reward_of, GCONFIG, letters).arun_episode(
        engine, {"prompt": "ab", "answer": "x", "length": 5}
    )
    assert row.token_ids.tolist() == [4, 2, 3, 1, 2, 1]
    assert row.loss_mask.tolist() == [0, 1, 1, 1, 0, 0]
    assert row.versions.tolist() == [-1, 0, 0, 0, -1, -1]
    assert row.logprobs.tolist() == pytest.approx([0, -0.1, -0.2, -0.3, 0, 0])
    assert row.reward == 1.0
    assert to_trajectories(row, group_id="g", episode_id="e")


async def test_an_answer_that_never_ends_is_all_answer(letters: Tokenizer, scripted: Any) -> None:
    engine = scripted([[2, 3, 2]])
    row = await LongTailWorkflow(reward_of, GCONFIG, letters).arun_episode(
        engine, {"prompt": "ab", "answer": "x", "length": 3}
    )
    assert row.loss_mask.tolist() == [0, 1, 1, 1]
    assert row.reward == 0.0


@pytest.mark.parametrize(("length", "asked"), [(3, 3), (600, 6)])
async def test_the_engine_writes_the_rows_length_whatever_it_writes(
    letters: Tokenizer, scripted: Any, length: int, asked: int
) -> None:
    engine = scripted([[2]])
    await LongTailWorkflow(reward_of, GCONFIG, letters).arun_episode(
        engine, {"prompt": "ab", "answer": "x", "length": length}
    )
    gconfig = engine.requests[0].gconfig
    assert (gconfig.max_new_tokens, gconfig.min_new_tokens, gconfig.ignore_eos) == (asked, 0, True)
    assert gconfig.temperature == 0.7


@pytest.mark.parametrize("length", [None, 0, -1, True, 2.5, "7"])
async def test_a_row_without_a_length_is_told(letters: Tokenizer, scripted: Any, length: Any) -> None:
    workflow = LongTailWorkflow(reward_of, GCONFIG, letters)
    with pytest.raises(ValueError, match="'length'"):
        await workflow.arun_episode(scripted([[2]]), {"prompt": "ab", "answer": "x", "length": length})
