"""What stands on the other side of a conversation: a game, a tool, a simulated user."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

#: text that is appended as it is, or chat messages that go through the chat template
Observation = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The environment's answer to one turn of the model.

    Attributes:
        observation: what the model sees next; may be empty.
        reward: of this turn.
        done: True ends the episode; the observation is still appended, so that the trajectory tells how it ended.
    """

    observation: Observation = ""
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """One episode's environment. Both methods may be ``async def``; blocking work belongs in a thread.

    Observations are of one kind throughout an episode: text, or chat messages.
    """

    def reset(self, data: dict[str, Any]) -> Observation | Awaitable[Observation]:
        """Begin with a dataset row; what the model sees first."""
        ...

    def step(self, answer: str) -> Step | Awaitable[Step]:
        """The model wrote ``answer`` (without special tokens)."""
        ...
