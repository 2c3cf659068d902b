"""Conversations with an environment: one trajectory, ids as sampled, rewards by turn."""

from __future__ import annotations

from typing import Any

import pytest

from areal_like.api import GenerationHyperparameters, Tokenizer
from areal_like.api.trajectory import PromptId
from areal_like.rollout.convert import to_trajectories
from areal_like.rollout.cursor import PromptVisit
from areal_like.rollout.episode_engine import EpisodeEngine, EpisodeIdentity
from areal_like.rollout.tokenizer import FastTokenizer, load_tokenizer
from workflows.environment import Step
from workflows.multi_turn import MultiTurnWorkflow

GCONFIG = GenerationHyperparameters(max_new_tokens=4)
CHATML = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and loop.last %} hm {% endif %} {{ m.content.split('</think>')[-1] }} <eos>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Echo:
    """Says "b" after every answer; done after ``turns`` answers; rewards 1, 2, 3, ..."""

    seen: list[str]

    def __init__(self, turns: int = 99, reply: Any = "b") -> None:
        self.turns, self.reply, self.seen = turns, reply, []

    def reset(self, data: dict[str, Any]) -> Any:
        return data["prompt"]

    def step(self, answer: str) -> Step:
        self.seen.append(answer)
        turn = len(self.seen)
        return Step(observation=self.reply, reward=float(turn), done=turn == self.turns)


class AsyncEcho(Echo):
    async def reset(self, data: dict[str, Any]) -> Any:
        return super().reset(data)

    async def step(self, answer: str) -> Any:
        return super().step(answer)


def workflow(tokenizer: Tokenizer, environment: Any = Echo, **options: Any) -> MultiTurnWorkflow:
    return MultiTurnWorkflow(
        **{"gconfig": GCONFIG, "tokenizer": tokenizer, "environment": environment, "max_turns": 3, **options}
    )


@pytest.mark.parametrize("environment", [Echo, AsyncEcho])
async def test_turns_are_appended_and_never_encoded_again(letters: Tokenizer, scripted: Any, environment: Any) -> None:
    engine = scripted([[2, 3], [2], [4]])
    row = await workflow(letters, environment).arun_episode(engine, {"prompt": "a"})
    assert row is not None
    # a | a b | b | a | b | ab | b: as text that is "aabbabab", which would encode to other ids
    assert row.token_ids.tolist() == [2, 2, 3, 3, 2, 3, 4, 3]
    assert row.loss_mask.tolist() == [0, 1, 1, 0, 1, 0, 1, 0]
    assert row.versions.tolist() == [-1, 0, 0, -1, 1, -1, 2, -1]
    assert [list(request.input_ids) for request in engine.requests] == [[2], [2, 2, 3, 3], [2, 2, 3, 3, 2, 3]]
    assert (row.reward, row.returns) == (6.0, None)
    assert to_trajectories(row, group_id="g", episode_id="e")


async def test_the_environment_ends_the_episode(letters: Tokenizer, scripted: Any) -> None:
    engine = scripted([[2], [2], [2]])
    row = await workflow(letters, environment_args={"turns": 2}).arun_episode(engine, {"prompt": "a"})
    assert row is not None
    assert (len(engine.requests), row.reward) == (2, 3.0)


async def test_turn_rewards_are_returned_to_go(letters: Tokenizer, scripted: Any) -> None:
    engine = scripted([[2, 3], [2], [4]])
    row = await workflow(letters, discount=0.5).arun_episode(engine, {"prompt": "a"})
    assert row is not None and row.returns is not None
    # rewards 1, 2, 3: third 3; second 2 + 3/2 = 3.5; first 1 + 3.5/2 = 2.75
    assert row.returns.tolist() == [0, 2.75, 2.75, 0, 3.5, 0, 3, 0]
    assert row.reward == 2.75


async def test_it_stops_when_no_room_is_left(letters: Tokenizer, scripted: Any) -> None:
    engine = scripted([[2, 2], [2, 2], [2, 2]])
    gconfig = GCONFIG.new(max_tokens=7)
    row = await workflow(letters, gconfig=gconfig).arun_episode(engine, {"prompt": "a"})
    # 1 + 3 + 3 = 7 tokens after two turns: nothing more fits
    assert row is not None
    assert (len(engine.requests), row.length, row.reward) == (2, 7, 3.0)


async def test_a_reward_function_scores_the_conversation_on_top(letters: Tokenizer, scripted: Any) -> None:
    calls = []

    async def reward_fn(*positional: Any, **data: Any) -> float:
        calls.append((positional, data))
        return 10.0

    environment = {"environment_args": {"turns": 2}}
    row = await workflow(letters, reward_fn=reward_fn, discount=1.0, **environment).arun_episode(
        scripted([[2], [3, 1]]), {"prompt": "ab", "goal": 7}
    )
    assert row is not None and row.returns is not None
    assert calls == [(("ab", "abbb", [4], [2, 3, 3, 1, 3]), {"goal": 7})]
    assert row.reward == 1 + 2 + 10
    assert row.returns.tolist() == [0, 13, 0, 12, 12, 0]


async def test_answers_without_any_token_are_rejected(letters: Tokenizer, scripted: Any) -> None:
    assert await workflow(letters, max_turns=2).arun_episode(scripted([[], []]), {"prompt": "a"}) is None


async def test_all_requests_of_an_episode_share_a_session(letters: Tokenizer, scripted: Any) -> None:
    engine = scripted([[2], [2], [2]])
    visit = PromptVisit(prompt=PromptId(epoch=0, index=0), attempt=0)
    bound = EpisodeEngine(
        engine,
        identity=EpisodeIdentity(visit=visit, sibling=1),
        run_seed=1,
        on_dispatch=lambda: None,
        on_tokens=lambda _: None,
    )
    await workflow(letters).arun_episode(bound, {"prompt": "a"})
    assert len({request.session_id for request in engine.requests}) == 1
    assert engine.requests[0].session_id
    assert len({request.seed for request in engine.requests}) == 3


@pytest.fixture
def chat(tmp_path: Any) -> FastTokenizer:
    """Ids: <pad> 0, <eos> 1, <user> 2, <assistant> 3, then words; the template drops reasoning from earlier turns."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    words = ["<pad>", "<eos>", "<user>", "<assistant>", "hi", "hm</think>yes", "more", "hm", "?", "yes", "no"]
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(words[:4])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    return load_tokenizer(tmp_path)


@pytest.mark.parametrize("answer", [[5, 1], [5]], ids=["the model ended its turn", "the budget cut it off"])
async def test_chat_turns_keep_what_a_template_would_strip(chat: Any, scripted: Any, answer: list[int]) -> None:
    more = [{"role": "user", "content": "more"}]
    engine = scripted([answer, [5, 1]])
    play = workflow(chat, Echo, environment_args={"reply": more}, max_turns=2)
    row = await play.arun_episode(engine, {"prompt": [{"role": "user", "content": "hi"}]})
    assert row is not None
    # <user> hi <eos> <assistant> | hm</think>yes <eos> | <user> more <eos> <assistant> | hm</think>yes <eos> | ...
    assert row.token_ids.tolist() == [2, 4, 1, 3, 5, 1, 2, 6, 1, 3, 5, 1, 2, 6, 1]
    written = [0, 0, 0, 0, 1, int(answer[-1] == 1), 0, 0, 0, 0, 1, 1, 0, 0, 0]
    assert row.loss_mask.tolist() == written


async def test_a_template_that_leaves_answers_out_is_refused(chat: Any, scripted: Any, tmp_path: Any) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    play = workflow(load_tokenizer(tmp_path), Echo, environment_args={"reply": [{"role": "user", "content": "hi"}]})
    with pytest.raises(ValueError, match="leaves earlier answers out"):
        await play.arun_episode(scripted([[5]]), {"prompt": [{"role": "user", "content": "hi"}]})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_turns": 0}, ValueError, "max_turns must be at least 1, not 0"),
        ({"discount": 2.0}, ValueError, r"discount must be within \[0, 1\]"),
        ({"environment": "workflows.guess.NoSuch"}, Exception, "workflows.guess has no 'NoSuch'"),
        (
            {"environment_args": {"trns": 1}},
            TypeError,
            "environment_args do not fit .*unexpected keyword argument 'trns'",
        ),
        ({"environment": 3}, TypeError, "is int, which cannot be called"),
    ],
)
def test_wrong_arguments_are_found_when_it_is_built(
    letters: Tokenizer, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        workflow(letters, **options)
