"""An engine whose requests appear in the run's timeline."""

from __future__ import annotations

from areal_like.api.engine import InferenceEngine
from areal_like.api.generation import ModelRequest, ModelResponse
from areal_like.observe.trace import Tracer


class TracedEngine:
    """Implements :class:`~areal_like.api.engine.InferenceEngine`: a span a request, with the versions that wrote it."""

    def __init__(self, engine: InferenceEngine, tracer: Tracer, *, track: str) -> None:
        self._engine = engine
        self._tracer = tracer
        self._track = track

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """See :meth:`InferenceEngine.agenerate`."""
        start = self._tracer.now()
        response = await self._engine.agenerate(request)
        versions = sorted(set(response.output_versions))
        self._tracer.complete(
            self._track, request.rid, start, self._tracer.now(), tokens=response.output_len, versions=versions
        )
        return response

    def get_version(self) -> int:
        return self._engine.get_version()
