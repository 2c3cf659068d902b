"""What every engine promises about new weights (DESIGN.md, sections 5 and 6)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import torch
from subjects import HUNG, TEST, TRANSPORTS, ServerProcess, perturbed

from areal_like.api.generation import ModelResponse, StopReason
from areal_like.api.weights import InterruptMode, TransportKind
from areal_like.errors import ConfigError, ServerUnavailable, WeightUpdateError
from areal_like.inference.backends.base import Capabilities, require

if TYPE_CHECKING:
    from conftest import Line

pytestmark = pytest.mark.timeout(TEST)

PROMPT = [10, 200, 31, 77, 150, 42]
#: longer than two blocks of any engine's prefix cache
LONG = [(7 * i) % 290 + 5 for i in range(400)]
WEIGHTS = dict[str, torch.Tensor]


@pytest.fixture(params=list(InterruptMode))
def mode(request: pytest.FixtureRequest, capabilities: Capabilities) -> InterruptMode:
    """Each way to meet running requests; one that this version lacks must be refused, in words that name the cure."""
    asked: InterruptMode = request.param
    if asked not in capabilities.interrupts:
        with pytest.raises(ConfigError, match=rf"rollout.interrupt: '{asked}' .*it needs {capabilities.engine} >= "):
            require(capabilities, interrupt=asked, transport=TransportKind.SHM, where="this environment")
        pytest.skip(f"{capabilities.engine} {capabilities.version} refuses interrupt={asked}")
    return asked


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_after_an_update_the_server_has_the_trainers_weights(
    open_line: Any, server: ServerProcess, transport: TransportKind
) -> None:
    """By log-probs, which see a tied head too: it takes part in every one."""
    async with open_line(server, transport=transport) as line:
        before = line.version
        answer = await line.ask(PROMPT, max_new_tokens=32)
        after = await line.publish()
        newer = await line.ask(PROMPT, max_new_tokens=32)
        assert line.distance(answer, before) < line.subject.noise
        assert line.distance(answer, after) > line.subject.apart
        assert line.distance(newer, after) < line.subject.noise
        assert set(newer.output_versions) == {after}


async def test_a_tied_head_follows_its_embedding(line: Line) -> None:
    """An update that changes the embedding alone: engines keep packed copies of it for the head."""
    before, after = line.version, line.prepare()
    weights = line.trainer.weights(before)
    embedding = weights["model.embed_tokens.weight"]
    generator = torch.Generator().manual_seed(after)
    noise = torch.randn(embedding.shape, generator=generator) * embedding.float().std() * 0.1
    line.trainer.made[after] = {
        **weights, "model.embed_tokens.weight": (embedding.float() + noise).to(embedding.dtype)
    }  # fmt: skip
    await line.publish(after)
    answer = await line.ask(PROMPT, max_new_tokens=32)
    assert line.distance(answer, after) < line.subject.noise
    assert line.distance(answer, before) > line.subject.apart


async def test_an_update_in_the_middle_of_an_answer(open_line: Any, server: ServerProcess, mode: InterruptMode) -> None:
    async with open_line(server, interrupt=mode) as line:
        before = line.version
        after = line.pack()
        most = line.subject.long
        asked = asyncio.create_task(line.ask(PROMPT, max_new_tokens=most))
        await line.in_hand()
        await line.publish(after)
        answer: ModelResponse = await asked
        assert answer.output_len == most
        old = answer.output_versions.count(before)
        if mode is InterruptMode.DRAIN:
            assert old == most
            return
        assert answer.output_versions == [before] * old + [after] * (most - old)
        assert 0 < old < most
        assert line.distance(answer, before, 0, old) < line.subject.noise
        if mode is InterruptMode.RECOMPUTE:
            assert line.distance(answer, after, old) < 1.5 * line.subject.noise
        else:
            assert line.distance(answer, before, old) > line.distance(answer, before, 0, old)


async def test_a_new_request_never_uses_the_old_prefix(
    open_line: Any, server: ServerProcess, mode: InterruptMode
) -> None:
    """The same long prompt before and after, while another answer keeps the cache in use."""
    async with open_line(server, interrupt=mode) as line:
        await line.ask(LONG, max_new_tokens=2)
        after = line.pack()
        other = asyncio.create_task(line.ask([*LONG, 9], max_new_tokens=line.subject.beside))
        await line.in_hand()
        await line.publish(after)
        answer = await line.ask(LONG, max_new_tokens=32)
        await other
        assert set(answer.output_versions) == {after}
        assert line.distance(answer, after) < 1.5 * line.subject.noise


async def test_a_stop_string_that_an_update_cuts_still_ends_the_answer(
    open_line: Any, server: ServerProcess, tokenizer: Any, mode: InterruptMode
) -> None:
    """The stop string is nearly the whole answer, so that it is half written when the update comes.

    Both versions are the model as it came, and the prompt ends in a loop that it is sure of (by 3 nats at each token of
    SmolLM2's): what is written is known beforehand, however the engine rounds.
    """
    words = tokenizer.encode("one two three four five six. " * 6)
    async with open_line(server, interrupt=mode, publish=False) as line:
        most = line.subject.long
        weights = perturbed(line.trainer.model, 0)
        await line.publish(line.prepare(weights))
        prompt = [*words, *(await line.ask(words, max_new_tokens=32, greedy=True)).output_tokens]
        free = await line.ask(prompt, max_new_tokens=most, greedy=True)
        text = tokenizer.decode(free.output_tokens)
        begin = len(tokenizer.decode(free.output_tokens[:4]))  # between two tokens, so that none is kept for its half
        stop = text[begin : len(tokenizer.decode(free.output_tokens[:-20]))]
        end = text.index(stop) + len(stop)
        after = line.pack(weights)
        before = line.channel.statistics().interrupted_requests
        asked = asyncio.create_task(line.ask(prompt, max_new_tokens=most, greedy=True, stop=(stop,)))
        await line.in_hand()
        await line.publish(after)
        assert line.channel.statistics().interrupted_requests - before == (mode is not InterruptMode.DRAIN)
        answer = await asked
        kept = tokenizer.decode(answer.output_tokens)
        assert answer.stop_reason is StopReason.STOP
        assert text[: end - len(stop)].startswith(kept.rstrip("\ufffd"))
        assert len(kept) <= begin


async def test_pause_and_resume_may_be_repeated(line: Line) -> None:
    control = line.link.control
    most = line.subject.long
    asked = asyncio.create_task(line.ask(PROMPT, max_new_tokens=most))
    await line.in_hand()
    for _ in range(2):
        assert (await control.pause(incarnation=0, mode=InterruptMode.KEEP, timeout=HUNG)).paused
    assert (await control.health(timeout=HUNG)).paused
    queued = asyncio.create_task(line.ask(PROMPT, max_new_tokens=4))
    done, _ = await asyncio.wait((asked, queued), timeout=1.0)
    assert not done
    for _ in range(2):
        assert not (await control.resume(incarnation=0, timeout=HUNG)).paused
    assert ((await asked).output_len, (await queued).output_len) == (most, 4)


async def test_a_drain_that_overruns_is_withdrawn(line: Line) -> None:
    """The answer goes on to its end under the weights it began with, and so does the server."""
    control, before = line.link.control, line.version
    manifest = await line.trainer.export_weights(line.prepare(), 0)
    await control.stage(manifest, timeout=HUNG)
    asked = asyncio.create_task(line.ask(PROMPT, max_new_tokens=line.subject.longest))
    await line.in_hand()
    moment = line.subject.moment
    with pytest.raises((WeightUpdateError, ServerUnavailable)):
        await control.commit(version=manifest.version, incarnation=0, mode=InterruptMode.DRAIN, timeout=moment)
    answer = await asked
    assert set(answer.output_versions) == {before}
    health = await control.health(timeout=HUNG)
    assert (health.version, health.paused) == (before, False)


def without_a_part(weights: WEIGHTS) -> WEIGHTS:
    """One of the tensors that engines fuse into one."""
    return {name: tensor for name, tensor in weights.items() if name != "model.layers.1.self_attn.k_proj.weight"}


def of_another_shape(weights: WEIGHTS) -> WEIGHTS:
    return {**weights, "model.norm.weight": weights["model.norm.weight"][:-1]}


def with_a_stranger(weights: WEIGHTS) -> WEIGHTS:
    return {**weights, "model.layers.99.mlp.gate.weight": torch.zeros(4, 4)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_a_part, r"k_proj.weight' is missing"),
        (of_another_shape, r"model.norm.weight' has shape"),
        (with_a_stranger, r"no tensor 'model.layers.99"),
    ],
)
async def test_a_wrong_tensor_is_refused_and_the_server_goes_on(line: Line, change: Any, said: str) -> None:
    before = line.version
    line.trainer.change = change
    with pytest.raises(WeightUpdateError, match=said):
        await line.publish()
    health = await line.link.control.health(timeout=HUNG)
    assert (health.version, health.paused) == (before, False)
    line.trainer.change = lambda weights: weights
    with pytest.raises(WeightUpdateError, match="none was in rotation"):
        await line.publish()
    line.version = (await line.channel.readmit(line.server.name)).version
    answer = await line.ask(PROMPT, max_new_tokens=32)
    assert line.distance(answer, line.version) < line.subject.noise
