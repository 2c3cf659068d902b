"""One prompt, one answer: ids as sampled, the row's fields to the reward, failures as failures."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from areal_like.api import GenerationHyperparameters, Tokenizer
from areal_like.errors import InfrastructureError, RewardError
from areal_like.rollout.convert import to_trajectories
from workflows.single_turn import SingleTurnWorkflow

GCONFIG = GenerationHyperparameters(n_samples=4, max_new_tokens=5, temperature=0.7)


class Recorder:
    """A reward function that keeps what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    async def __call__(self, *positional: Any, **data: Any) -> float:
        self.calls.append((positional, data))
        return 0.5


async def test_the_ids_that_were_sampled_are_the_ids_that_are_trained(letters: Tokenizer, scripted: Any) -> None:
    engine, reward_fn = scripted([[2, 3, 1]]), Recorder()
    workflow = SingleTurnWorkflow(reward_fn, GCONFIG, letters)
    row = await workflow.arun_episode(engine, {"prompt": "abab", "answer": "x", "n": 3})
    assert row is not None
    assert letters.encode("ab") == [4]  # encoding the answer's text again would give another id
    assert row.token_ids.tolist() == [4, 4, 2, 3, 1]
    assert row.loss_mask.tolist() == [0, 0, 1, 1, 1]
    assert row.versions.tolist() == [-1, -1, 0, 0, 0]
    assert row.logprobs.tolist() == pytest.approx([0, 0, -0.1, -0.2, -0.3])
    assert row.reward == 0.5
    assert to_trajectories(row, group_id="g", episode_id="e")
    (positional, data) = reward_fn.calls[0]
    assert positional == ("abab", "ab", [4, 4], [2, 3, 1])
    assert data == {"answer": "x", "n": 3}


async def test_concurrent_episodes_share_no_list_and_leave_gconfig_alone(letters: Tokenizer, scripted: Any) -> None:
    engine = scripted([[2], [3], [2]])
    workflow = SingleTurnWorkflow(Recorder(), GCONFIG, letters)
    rows = await asyncio.gather(*(workflow.arun_episode(engine, {"prompt": "a"}) for _ in range(3)))
    assert sorted(row.token_ids.tolist() for row in rows if row is not None) == [[2, 2], [2, 2], [2, 3]]
    assert len({id(request.input_ids) for request in engine.requests}) == 3
    assert all(request.gconfig == GCONFIG for request in engine.requests)


async def test_messages_go_through_the_chat_template(letters: Any, scripted: Any, tmp_path: Any) -> None:
    from areal_like.rollout.tokenizer import load_tokenizer

    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<eos>{% endfor %}")
    engine = scripted([[2]])
    workflow = SingleTurnWorkflow(Recorder(), GCONFIG, load_tokenizer(tmp_path))
    await workflow.arun_episode(engine, {"messages": [{"role": "user", "content": "ba"}]})
    assert engine.requests[0].input_ids == [3, 2, 1]


async def test_an_answer_without_tokens_is_rejected_not_trained(letters: Tokenizer, scripted: Any) -> None:
    assert await SingleTurnWorkflow(Recorder(), GCONFIG, letters).arun_episode(scripted([[]]), {"prompt": "a"}) is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"question": "a"}, r"a row needs 'prompt' \(text\) or 'messages' \(a chat\).*it has \['question'\]"),
        ({"prompt": "a", "messages": []}, "and not both"),
        ({"prompt": ["a"]}, "'prompt' must be text, not list"),
        ({"prompt": ""}, "has no tokens"),
    ],
)
async def test_a_row_without_a_prompt_is_explained(
    letters: Tokenizer, scripted: Any, data: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        await SingleTurnWorkflow(Recorder(), GCONFIG, letters).arun_episode(scripted([[2]]), data)


@pytest.mark.parametrize("fault", [InfrastructureError("no server"), RewardError("broken")])
async def test_a_failure_never_becomes_a_reward(letters: Tokenizer, scripted: Any, fault: Exception) -> None:
    async def failing(*_: Any, **__: Any) -> Any:
        raise fault

    engine = scripted([[2]])
    if isinstance(fault, InfrastructureError):
        engine.agenerate = failing
    with pytest.raises(type(fault)):
        await SingleTurnWorkflow(failing, GCONFIG, letters).arun_episode(engine, {"prompt": "a"})
