"""One prompt, one answer, and a tail behind it: a workload whose lengths are known and long-tailed, for measuring."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from areal_like.api import (
    GenerationHyperparameters,
    InferenceEngine,
    ModelRequest,
    ModelResponse,
    RewardFunction,
    RolloutWorkflow,
    Tokenizer,
    Trajectory,
)
from areal_like.api.transcript import Transcript
from workflows.prompts import prompt_ids, reward_fields


class LongTailWorkflow(RolloutWorkflow):
    """``SingleTurnWorkflow`` whose engine writes exactly ``length`` tokens for a row, wherever the answer ends.

    The answer is what comes up to the first end-of-sequence token: it is rewarded and trained on. What the engine goes
    on to write stays in the row as context (mask 0), so that servers and trainer have the work of long answers, and
    the task is still the short one. A row's ``length`` above ``gconfig.max_new_tokens`` is cut to it.
    """

    def __init__(self, reward_fn: RewardFunction, gconfig: GenerationHyperparameters, tokenizer: Tokenizer) -> None:
        self._reward_fn = reward_fn
        self._gconfig = gconfig
        self._tokenizer = tokenizer

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory:
        """One request.

        Raises:
            ValueError: the row has no whole number ``length`` of at least 1.
        """
        length = data.get("length")
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(f"a row needs 'length', the tokens to write, a whole number of at least 1; got {length!r}")
        transcript = Transcript()
        transcript.add_context(prompt_ids(data, self._tokenizer))
        gconfig = self._gconfig.new(
            max_new_tokens=min(length, self._gconfig.max_new_tokens), min_new_tokens=0, ignore_eos=True
        )
        response = await engine.agenerate(ModelRequest(input_ids=transcript.ids, gconfig=gconfig))
        answer, tail = split_at_end(response, self._tokenizer.eos_token_id)
        reward = await self._reward_fn(
            self._tokenizer.decode(transcript.ids),
            self._tokenizer.decode(answer.output_tokens, skip_special_tokens=True),
            transcript.ids,
            answer.output_tokens,
            **reward_fields(data),
        )
        transcript.add_answer(answer)
        transcript.add_context(tail)
        return transcript.build(reward)


def split_at_end(response: ModelResponse, end: int | None) -> tuple[ModelResponse, list[int]]:
    """The answer up to the first ``end`` token, which belongs to it, and the ids behind; all of it without one."""
    tokens = response.output_tokens
    kept = tokens.index(end) + 1 if end in tokens else len(tokens)
    answer = replace(
        response,
        output_tokens=tokens[:kept],
        output_logprobs=response.output_logprobs[:kept],
        output_versions=response.output_versions[:kept],
    )
    return answer, tokens[kept:]
