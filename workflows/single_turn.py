"""One prompt, one answer, one reward."""

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
from workflows.prompts import prompt_ids, reward_fields


class SingleTurnWorkflow(RolloutWorkflow):
    """Rows hold ``prompt`` (text) or ``messages`` (a chat); every other field goes to the reward function."""

    def __init__(self, reward_fn: RewardFunction, gconfig: GenerationHyperparameters, tokenizer: Tokenizer) -> None:
        self._reward_fn = reward_fn
        self._gconfig = gconfig
        self._tokenizer = tokenizer

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory | None:
        """One request; the trajectory holds the ids as they were sampled. None for an answer without tokens."""
        transcript = Transcript()
        transcript.add_context(prompt_ids(data, self._tokenizer))
        response = await engine.agenerate(ModelRequest(input_ids=transcript.ids, gconfig=self._gconfig))
        if not response.output_tokens:
            return None
        reward = await self._reward_fn(
            self._tokenizer.decode(transcript.ids),
            self._tokenizer.decode(response.output_tokens, skip_special_tokens=True),
            transcript.ids,
            response.output_tokens,
            **reward_fields(data),
        )
        transcript.add_answer(response)
        return transcript.build(reward)
