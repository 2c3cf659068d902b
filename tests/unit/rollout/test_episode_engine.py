import asyncio

import pytest

from areal_like.api import InferenceEngine, ModelRequest, ModelResponse, StopReason
from areal_like.api.trajectory import PromptId
from areal_like.rollout.cursor import PromptVisit
from areal_like.rollout.episode_engine import EpisodeEngine, EpisodeIdentity

IDENTITY = EpisodeIdentity(visit=PromptVisit(prompt=PromptId(epoch=1, index=5), attempt=2), sibling=3, retry=1)


class Recorder:
    """An engine that remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[ModelRequest] = []
        self.log: list[str] = []

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.requests.append(request)
        self.log.append("generate")
        return ModelResponse(
            input_tokens=list(request.input_ids),
            output_tokens=[1, 2, 3],
            output_logprobs=[-1.0] * 3,
            output_versions=[0] * 3,
            stop_reason=StopReason.STOP,
        )

    def get_version(self) -> int:
        return 4


def bound(recorder: Recorder, identity: EpisodeIdentity = IDENTITY) -> EpisodeEngine:
    return EpisodeEngine(
        recorder,
        identity=identity,
        run_seed=1,
        on_dispatch=lambda: recorder.log.append("dispatch"),
        on_tokens=lambda count: recorder.log.append(f"{count} tokens"),
    )


async def test_requests_carry_the_episodes_identity() -> None:
    recorder = Recorder()
    engine: InferenceEngine = bound(recorder)
    await engine.agenerate(ModelRequest(input_ids=[1]))
    await engine.agenerate(ModelRequest(input_ids=[1]))
    first, second = recorder.requests
    assert (first.group_id, first.session_id, first.rid) == ("e1-p5-a2", "e1-p5-a2-s3-r1", "e1-p5-a2-s3-r1-q0")
    assert second.rid == "e1-p5-a2-s3-r1-q1"
    assert first.seed != second.seed
    assert engine.get_version() == 4


async def test_what_the_workflow_set_is_kept() -> None:
    recorder = Recorder()
    request = ModelRequest(input_ids=[1], rid="mine", session_id="s", group_id="g", seed=7)
    await bound(recorder).agenerate(request)
    sent = recorder.requests[0]
    assert (sent.rid, sent.session_id, sent.group_id, sent.seed) == ("mine", "s", "g", 7)


async def test_the_dispatch_is_reported_before_the_request_leaves() -> None:
    recorder = Recorder()
    await bound(recorder).agenerate(ModelRequest(input_ids=[1]))
    assert recorder.log == ["dispatch", "generate", "3 tokens"]


async def test_a_list_that_grows_later_does_not_change_the_request() -> None:
    recorder, ids = Recorder(), [1, 2]
    await bound(recorder).agenerate(ModelRequest(input_ids=ids))
    ids.append(3)
    assert list(recorder.requests[0].input_ids) == [1, 2]


async def test_concurrent_requests_of_one_episode_have_seeds_of_their_own() -> None:
    recorder = Recorder()
    engine = bound(recorder)
    await asyncio.gather(*(engine.agenerate(ModelRequest(input_ids=[1])) for _ in range(20)))
    assert len({request.seed for request in recorder.requests}) == 20
    assert len({request.rid for request in recorder.requests}) == 20


@pytest.mark.parametrize(
    "other",
    [
        EpisodeIdentity(visit=PromptVisit(prompt=PromptId(epoch=2, index=5), attempt=2), sibling=3, retry=1),
        EpisodeIdentity(visit=PromptVisit(prompt=PromptId(epoch=1, index=6), attempt=2), sibling=3, retry=1),
        EpisodeIdentity(visit=PromptVisit(prompt=PromptId(epoch=1, index=5), attempt=3), sibling=3, retry=1),
        EpisodeIdentity(visit=PromptVisit(prompt=PromptId(epoch=1, index=5), attempt=2), sibling=4, retry=1),
        EpisodeIdentity(visit=PromptVisit(prompt=PromptId(epoch=1, index=5), attempt=2), sibling=3, retry=2),
    ],
)
def test_every_part_of_the_identity_changes_the_seed(other: EpisodeIdentity) -> None:
    assert other.seed(1, 0) != IDENTITY.seed(1, 0)
    assert other.episode_id != IDENTITY.episode_id


def test_seeds_depend_on_the_run_and_are_repeatable() -> None:
    assert IDENTITY.seed(1, 0) == IDENTITY.seed(1, 0)
    assert IDENTITY.seed(1, 0) != IDENTITY.seed(2, 0)
    assert 0 <= IDENTITY.seed(1, 0) < 2**64
