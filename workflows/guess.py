"""Guess-a-number: a hidden secret, a few guesses, and 'higher', 'lower' or 'correct' after each."""

from __future__ import annotations

from typing import Any

from areal_like.api import (
    GenerationHyperparameters,
    InferenceEngine,
    ModelRequest,
    RewardFunction,
    RolloutWorkflow,
    Tokenizer,
    Trajectory,
)
from areal_like.api.transcript import Transcript
from workflows.environment import Step
from workflows.prompts import reward_fields

#: what a game begins with
OPENING = "<bos>"


def guessed(answer: str) -> int | None:
    """The number that an answer consists of; None if it is anything else, such as nothing or two numbers."""
    text = answer.strip()
    return int(text) if text.isascii() and text.isdigit() else None


class GuessEnvironment:
    """The game for one row ``{"secret": int}``. An answer that is not one number ends it: there is no reply to it."""

    def __init__(self) -> None:
        self._secret = 0

    def reset(self, data: dict[str, Any]) -> str:
        """Raises ValueError if the row has no integer ``secret``."""
        secret = data.get("secret")
        if isinstance(secret, bool) or not isinstance(secret, int):
            raise ValueError(f"a row needs an integer 'secret'; it has {data!r:.200}")
        self._secret = secret
        return OPENING

    def step(self, answer: str) -> Step:
        """Reward 1 for the secret, else 0."""
        guess = guessed(answer)
        if guess is None:
            return Step(done=True)
        if guess == self._secret:
            return Step(observation="correct", reward=1.0, done=True)
        return Step(observation="higher" if guess < self._secret else "lower")


class GuessWorkflow(RolloutWorkflow):
    """``<bos> 3 <eos> higher 4 <eos> correct``: per turn the model writes a number and ends it, the game replies.

    A game ends with the hit, with an answer that is not one number, or after ``turns``. The same as
    ``MultiTurnWorkflow`` over :class:`GuessEnvironment`, written out: a workflow of one's own is no longer than this.
    With ``reward_fn`` the game's guesses, separated by spaces, are scored by it; without, a hit is 1 and anything else
    0.
    """

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Tokenizer,
        turns: int = 4,
        reward_fn: RewardFunction | None = None,
    ) -> None:
        if turns < 1:
            raise ValueError(f"turns must be at least 1, not {turns}")
        self._gconfig = gconfig
        self._tokenizer = tokenizer
        self._turns = turns
        self._reward_fn = reward_fn
        self._replies = {word: tokenizer.encode(word, False) for word in ("higher", "lower", "correct", "")}

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory:
        """Play one game; the trajectory's reward is 1 if the secret was hit."""
        game = GuessEnvironment()
        transcript = Transcript()
        opening = self._tokenizer.encode(game.reset(data), add_special_tokens=False)
        transcript.add_context(opening)
        guesses: list[int] = []
        reward = 0.0
        for _ in range(self._turns):
            response = await engine.agenerate(ModelRequest(input_ids=transcript.ids, gconfig=self._gconfig))
            transcript.add_answer(response)
            answer = self._tokenizer.decode(response.output_tokens, skip_special_tokens=True)
            step = game.step(answer)
            transcript.add_context(self._replies[str(step.observation)])
            reward += step.reward
            guess = guessed(answer)
            if guess is not None:
                guesses.append(guess)
            if step.done:
                break
        if self._reward_fn is not None:
            written = transcript.ids[len(opening) :]
            reward = await self._reward_fn(
                OPENING, " ".join(map(str, guesses)), opening, written, **reward_fields(data)
            )
        return transcript.build(reward)
