"""The engine as a workflow sees it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from areal_like.api.generation import ModelRequest, ModelResponse


@runtime_checkable
class InferenceEngine(Protocol):
    """Where a workflow sends its requests; the episode's seed, group and affinity are already bound to it."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Generate one answer.

        Raises:
            RequestError: the request can never succeed (empty or too long prompt, bad parameters).
            InfrastructureError: no server could answer within the deadline.
        """
        ...

    def get_version(self) -> int:
        """The lowest weight version acknowledged by any server in rotation."""
        ...
