"""A conversation between the model and an environment, as one trajectory."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from areal_like.api import (
    GenerationHyperparameters,
    InferenceEngine,
    ModelRequest,
    RewardFunction,
    RolloutWorkflow,
    Tokenizer,
    Trajectory,
)
from areal_like.api.dotted import import_object
from areal_like.api.transcript import Transcript
from workflows.chat_turns import ChatTurns
from workflows.environment import Environment, Observation
from workflows.prompts import reward_fields

_T = TypeVar("_T")


class MultiTurnWorkflow(RolloutWorkflow):
    """Turns until the environment is done, ``max_turns`` are played, or ``gconfig.max_tokens`` leaves no room.

    What the environment says is tokenised and appended with mask 0; what the model writes is appended as it was sampled
    and never encoded again. ``gconfig.max_new_tokens`` is the budget of one turn. All requests of an episode share its
    session, so that they go to the server that has their prefix cached.

    Args:
        environment: dotted path of a class or factory, or the callable itself; called per episode with
            ``environment_args``.
        max_turns: most answers of one episode.
        discount: None gives the trajectory one reward, the sum over its turns. A number gives every turn its own
            discounted return-to-go.
        reward_fn: optional; scores the whole conversation, and its score is added to the last turn's reward.
    """

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Tokenizer,
        environment: str | Callable[..., Environment],
        environment_args: Mapping[str, Any] | None = None,
        max_turns: int = 8,
        discount: float | None = None,
        reward_fn: RewardFunction | None = None,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, not {max_turns}")
        if discount is not None and not 0.0 <= discount <= 1.0:
            raise ValueError(f"discount must be within [0, 1], or null for one reward, not {discount}")
        self._gconfig = gconfig
        self._tokenizer = tokenizer
        self._chat = ChatTurns(tokenizer)
        self._environment_args = dict(environment_args or {})
        self._new_environment = _factory(environment, self._environment_args)
        self._max_turns = max_turns
        self._discount = discount
        self._reward_fn = reward_fn

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory | None:
        """Play one episode. None if the model wrote nothing at all."""
        environment = self._new_environment(**self._environment_args)
        transcript = Transcript()
        transcript.add_context(self._opening(await _settled(environment.reset(data))))
        opening = len(transcript)
        rewards: list[float] = []
        for turn in range(1, self._max_turns + 1):
            response = await engine.agenerate(ModelRequest(input_ids=transcript.ids, gconfig=self._gconfig))
            answer = response.output_tokens
            transcript.add_answer(response)
            step = await _settled(environment.step(self._tokenizer.decode(answer, skip_special_tokens=True)))
            rewards.append(step.reward)
            last = step.done or turn == self._max_turns
            transcript.add_context(self._following(answer, step.observation, last=last))
            if last or not self._has_room(transcript):
                break
        if self._reward_fn is not None:
            rewards[-1] += await self._score(self._reward_fn, transcript.ids, opening, data)
        return self._build(transcript, rewards)

    def _opening(self, observation: Observation) -> list[int]:
        if isinstance(observation, str):
            return self._tokenizer.encode(observation)
        return self._chat.opening(observation)

    def _following(self, answer: Sequence[int], observation: Observation, *, last: bool) -> list[int]:
        if isinstance(observation, str):
            return self._tokenizer.encode(observation, add_special_tokens=False) if observation else []
        return self._chat.following(answer, observation, last=last)

    def _has_room(self, transcript: Transcript) -> bool:
        limit = self._gconfig.max_tokens
        return limit is None or len(transcript) < limit

    async def _score(
        self, reward_fn: RewardFunction, ids: Sequence[int], opening: int, data: Mapping[str, Any]
    ) -> float:
        return await reward_fn(
            self._tokenizer.decode(ids[:opening]),
            self._tokenizer.decode(ids[opening:], skip_special_tokens=True),
            ids[:opening],
            ids[opening:],
            **reward_fields(data),
        )

    def _build(self, transcript: Transcript, rewards: Sequence[float]) -> Trajectory | None:
        if transcript.n_written == 0:
            return None
        if self._discount is None:
            return transcript.build(sum(rewards))
        return transcript.build_with_turn_rewards(rewards, discount=self._discount)


def _factory(environment: str | Callable[..., Environment], arguments: Mapping[str, Any]) -> Callable[..., Environment]:
    """What makes environments; arguments that do not fit it should not wait for the first episode."""
    made = import_object(environment, "environment") if isinstance(environment, str) else environment
    if not callable(made):
        raise TypeError(f"environment {environment!r} is {type(made).__name__}, which cannot be called")
    try:
        inspect.signature(made).bind(**arguments)
    except TypeError as error:
        raise TypeError(f"environment_args do not fit {environment}: {error}") from error
    return cast(Callable[..., Environment], made)


async def _settled(value: _T | Awaitable[_T]) -> _T:
    """The value itself, or what it resolves to: environments may be plain or asynchronous."""
    return await value if inspect.isawaitable(value) else value
