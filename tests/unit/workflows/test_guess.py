"""Guess-a-number: the game, its trajectory, and the same game through the general workflow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from areal_like.api import GenerationHyperparameters, Tokenizer
from areal_like.rollout.convert import to_trajectories
from workflows.guess import GuessEnvironment, GuessWorkflow
from workflows.multi_turn import MultiTurnWorkflow
from workflows.rewards.guess import hit_secret

BOS, HIGHER, LOWER, CORRECT, ZERO = 1, 3, 4, 5, 6
GCONFIG = GenerationHyperparameters(n_samples=8, max_new_tokens=64)


@pytest.mark.parametrize(
    ("written", "ids", "mask", "reward"),
    [
        # secret 2: 0 is too low, 4 too high
        ([0, 4, 2], [BOS, 6, HIGHER, 10, LOWER, 8, CORRECT], [0, 1, 0, 1, 0, 1, 0], 1.0),
        ([2], [BOS, 8, CORRECT], [0, 1, 0], 1.0),
        ([4, 4, 3], [BOS, 10, LOWER, 10, LOWER, 9, LOWER], [0, 1, 0, 1, 0, 1, 0], 0.0),
    ],
)
async def test_a_game_is_guess_and_reply_in_turns(
    guesses: Tokenizer, scripted: Any, written: list[int], ids: list[int], mask: list[int], reward: float
) -> None:
    engine = scripted([[ZERO + number] for number in written])
    row = await GuessWorkflow(GCONFIG, guesses, turns=3).arun_episode(engine, {"secret": 2})
    assert row.token_ids.tolist() == ids
    assert row.loss_mask.tolist() == mask
    assert row.reward == reward
    assert to_trajectories(row, group_id="g", episode_id="e")
    assert {request.gconfig.max_new_tokens for request in engine.requests} == {1}
    assert [list(request.input_ids) for request in engine.requests] == [ids[: 1 + 2 * n] for n in range(len(written))]


@pytest.mark.parametrize("token", [0, 2, HIGHER])
async def test_a_wrong_token_ends_the_game(guesses: Tokenizer, scripted: Any, token: int) -> None:
    row = await GuessWorkflow(GCONFIG, guesses).arun_episode(scripted([[6], [token]]), {"secret": 2})
    assert row.token_ids.tolist() == [BOS, 6, HIGHER, token]
    assert row.reward == 0.0


@pytest.mark.parametrize("written", [[8], [6, 10, 8], [6, 7, 9], [6, HIGHER]])
async def test_the_general_workflow_plays_the_same_game(guesses: Tokenizer, scripted: Any, written: list[int]) -> None:
    script = [[token] for token in written]
    general = MultiTurnWorkflow(
        GCONFIG.new(max_new_tokens=1), guesses, environment="workflows.guess.GuessEnvironment", max_turns=3
    )
    first = await general.arun_episode(scripted(script), {"secret": 2})
    second = await GuessWorkflow(GCONFIG, guesses, turns=3).arun_episode(scripted(script), {"secret": 2})
    assert first is not None
    assert first.reward == second.reward
    for name in ("token_ids", "loss_mask", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


@pytest.mark.parametrize(("written", "reward"), [([6, 8], 1.0), ([6, 6, 6], 0.0), ([HIGHER], 0.0)])
async def test_a_reward_function_sees_the_guesses(
    guesses: Tokenizer, scripted: Any, written: list[int], reward: float
) -> None:
    async def reward_fn(*positional: Any, **data: Any) -> float:
        return hit_secret(*positional, **data)

    play = GuessWorkflow(GCONFIG, guesses, turns=3, reward_fn=reward_fn)
    row = await play.arun_episode(scripted([[token] for token in written]), {"secret": 2})
    assert row.reward == reward


@pytest.mark.parametrize("row", [{}, {"secret": "2"}, {"secret": True}])
def test_a_row_without_a_secret_is_explained(row: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a row needs an integer 'secret'"):
        GuessEnvironment().reset(row)


def test_there_is_at_least_one_turn(guesses: Tokenizer) -> None:
    with pytest.raises(ValueError, match="turns must be at least 1"):
        GuessWorkflow(GCONFIG, guesses, turns=0)
