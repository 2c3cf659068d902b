from __future__ import annotations

from pathlib import Path

import pytest

from areal_like.api.generation import ModelRequest, ModelResponse, StopReason
from areal_like.control.traced_engine import TracedEngine
from areal_like.errors import RequestError
from areal_like.observe.trace import Tracer, read_trace


class Engine:
    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        if not request.input_ids:
            raise RequestError("empty prompt")
        return ModelResponse(
            input_tokens=list(request.input_ids),
            output_tokens=[4, 5, 6],
            output_logprobs=[-1.0] * 3,
            output_versions=[7, 8, 8],
            stop_reason=StopReason.LENGTH,
        )

    def get_version(self) -> int:
        return 8


async def test_a_request_is_a_span_with_the_versions_that_wrote_it(tmp_path: Path) -> None:
    with Tracer(tmp_path / "trace.json", process="controller") as tracer:
        engine = TracedEngine(Engine(), tracer, track="generation")
        assert engine.get_version() == 8
        assert (await engine.agenerate(ModelRequest(input_ids=[1], rid="e0-q0"))).output_len == 3
        with pytest.raises(RequestError):
            await engine.agenerate(ModelRequest(input_ids=[]))
    (span,) = [event for event in read_trace(tmp_path / "trace.json") if event["ph"] == "X"]
    assert span["name"] == "e0-q0"
    assert span["args"] == {"tokens": 3, "versions": [7, 8]}
    assert span["dur"] >= 0
