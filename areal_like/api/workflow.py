"""What a person writes for a new task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from areal_like.api.engine import InferenceEngine
from areal_like.api.trajectory import Trajectory

#: What ``arun_episode`` may return: one trajectory, several, ``None`` (rejected), or AReaL's dict of tensors.
EpisodeResult = Trajectory | Sequence[Trajectory] | Mapping[str, Any] | None


#: what every reward function is called with, in this order; a row's fields follow by keyword
REWARD_ARGUMENTS = ("prompt", "completions", "prompt_ids", "completion_ids")


def reward_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a row that a reward function receives by keyword: those it does not have already."""
    return {name: value for name, value in data.items() if name not in REWARD_ARGUMENTS}


class RewardFunction(Protocol):
    """The user's reward function as a workflow calls it: off the event loop, under a time limit."""

    async def __call__(
        self, prompt: str, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], /, **data: Any
    ) -> float:
        """Score one completion. A field of the row that is named like one of the first four is not passed twice.

        Raises:
            RewardError: the user's function raised, hung past its limit, or returned no finite number.
        """
        ...


class Tokenizer(Protocol):
    """The part of a tokenizer that workflows need."""

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def pad_token_id(self) -> int | None: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]: ...


class RolloutWorkflow(ABC):
    """One task. ``arun_episode`` is called ``gconfig.n_samples`` times per prompt, concurrently.

    A workflow is constructed once per run with those of ``reward_fn``, ``gconfig`` and ``tokenizer`` that its
    ``__init__`` names, and with ``workflow_args`` of the experiment file.
    """

    @abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> EpisodeResult:
        """Run one episode for one dataset row.

        Args:
            engine: generates; bound to this episode.
            data: the dataset row; a private copy.

        Returns:
            one trajectory, a list of them, ``None`` to reject the episode, or AReaL's tensor dict.
        """
