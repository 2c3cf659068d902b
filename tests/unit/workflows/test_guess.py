"""Guess-a-number: the game, its trajectory, and the same game through the general workflow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from areal_like.api import GenerationHyperparameters, Tokenizer
from areal_like.rollout.convert import to_trajectories
from workflows.guess import GuessEnvironment, GuessWorkflow
from workflows.multi_turn import MultiTurnWorkflow
from workflows.rewards.guess import hit_secret

BOS, EOS, HIGHER, LOWER, CORRECT, ZERO = 1, 2, 3, 4, 5, 6
GCONFIG = GenerationHyperparameters(n_samples=8, max_new_tokens=4)


def turns(*numbers: int) -> list[list[int]]:
    """What the model writes when it names these numbers: each with the token that ends a turn."""
    return [[ZERO + number, EOS] for number in numbers]


@pytest.mark.parametrize(
    ("written", "ids", "mask", "reward"),
    [
        # secret 2: 0 is too low, 4 too high
        (
            [0, 4, 2],
            [BOS, 6, EOS, HIGHER, 10, EOS, LOWER, 8, EOS, CORRECT],
            [0, 1, 1, 0, 1, 1, 0, 1, 1, 0],
            1.0,
        ),
        ([2], [BOS, 8, EOS, CORRECT], [0, 1, 1, 0], 1.0),
        (
            [4, 4, 3],
            [BOS, 10, EOS, LOWER, 10, EOS, LOWER, 9, EOS, LOWER],
            [0, 1, 1, 0, 1, 1, 0, 1, 1, 0],
            0.0,
        ),
    ],
)
async def test_a_game_is_guess_and_reply_in_turns(
    guesses: Tokenizer, scripted: Any, written: list[int], ids: list[int], mask: list[int], reward: float
) -> None:
    engine = scripted(turns(*written))
    row = await GuessWorkflow(GCONFIG, guesses, turns=3).arun_episode(engine, {"secret": 2})
    assert row.token_ids.tolist() == ids
    assert row.loss_mask.tolist() == mask
    assert row.reward == reward
    assert to_trajectories(row, group_id="g", episode_id="e")
    assert {request.gconfig for request in engine.requests} == {GCONFIG}
    assert [list(request.input_ids) for request in engine.requests] == [ids[: 1 + 3 * n] for n in range(len(written))]


async def test_a_turn_keeps_the_version_of_each_token(guesses: Tokenizer, scripted: Any) -> None:
    """A commit between a number and its end gives one turn two versions."""
    engine = scripted(turns(0, 2))

    class Interrupted:
        async def agenerate(self, request: Any) -> Any:
            response = await engine.agenerate(request)
            return replace(response, output_versions=[7, 8])

        def get_version(self) -> int:
            return 8

    row = await GuessWorkflow(GCONFIG, guesses).arun_episode(Interrupted(), {"secret": 2})
    assert row.versions.tolist() == [-1, 7, 8, -1, 7, 8, -1]


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param([EOS], id="nothing"),
        pytest.param([HIGHER, EOS], id="a word"),
        pytest.param([8, 8, EOS], id="two numbers, both the secret"),
        pytest.param([8, HIGHER, EOS], id="the secret and a word"),
        pytest.param([8, 7, 6, 9], id="no end within the budget"),
        pytest.param([], id="no token"),
    ],
)
async def test_an_answer_that_is_not_one_number_ends_the_game(
    guesses: Tokenizer, scripted: Any, answer: list[int]
) -> None:
    row = await GuessWorkflow(GCONFIG, guesses).arun_episode(scripted([*turns(0), answer]), {"secret": 2})
    assert row.token_ids.tolist() == [BOS, 6, EOS, HIGHER, *answer]
    assert row.loss_mask.tolist() == [0, 1, 1, 0, *(1 for _ in answer)]
    assert row.reward == 0.0


@pytest.mark.parametrize("written", [turns(2), turns(0, 4, 2), turns(0, 1, 3), [*turns(0), [HIGHER, EOS]]])
async def test_the_general_workflow_plays_the_same_game(
    guesses: Tokenizer, scripted: Any, written: list[list[int]]
) -> None:
    general = MultiTurnWorkflow(GCONFIG, guesses, environment="workflows.guess.GuessEnvironment", max_turns=3)
    first = await general.arun_episode(scripted(written), {"secret": 2})
    second = await GuessWorkflow(GCONFIG, guesses, turns=3).arun_episode(scripted(written), {"secret": 2})
    assert first is not None
    assert first.reward == second.reward
    for name in ("token_ids", "loss_mask", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


@pytest.mark.parametrize(
    ("written", "reward"), [(turns(0, 2), 1.0), (turns(0, 0, 0), 0.0), ([[HIGHER, EOS]], 0.0), ([[8, 8, EOS]], 0.0)]
)
async def test_a_reward_function_sees_the_guesses(
    guesses: Tokenizer, scripted: Any, written: list[list[int]], reward: float
) -> None:
    async def reward_fn(*positional: Any, **data: Any) -> float:
        return hit_secret(*positional, **data)

    play = GuessWorkflow(GCONFIG, guesses, turns=3, reward_fn=reward_fn)
    row = await play.arun_episode(scripted(written), {"secret": 2})
    assert row.reward == reward


@pytest.mark.parametrize("row", [{}, {"secret": "2"}, {"secret": True}])
def test_a_row_without_a_secret_is_explained(row: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a row needs an integer 'secret'"):
        GuessEnvironment().reset(row)


def test_there_is_at_least_one_turn(guesses: Tokenizer) -> None:
    with pytest.raises(ValueError, match="turns must be at least 1"):
        GuessWorkflow(GCONFIG, guesses, turns=0)
