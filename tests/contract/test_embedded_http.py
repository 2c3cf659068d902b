"""The embedded server through real HTTP: a tiny random Llama, uvicorn on a port of its own, httpx."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from areal_like.api.generation import StopReason
from areal_like.api.weights import CommitReceipt, Manifest, TransportKind
from areal_like.api.wire import DigestAnswer, GenerateAnswer, HealthAnswer, PauseAnswer, StageAnswer
from areal_like.inference.embedded.server import EmbeddedServer
from areal_like.inference.spec import InferenceServerSpec
from areal_like.weights.transports.base import make_writer

TOKEN = "secret"
VOCABULARY = 48
CONTEXT = 2048
#: tokens of an answer that is still being written when a commit comes, on a busy machine too
LONG = 1600


def build_model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build_model(seed=0).save_pretrained(folder)
    words = {"<bos>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    return folder


@pytest.fixture
async def server(model_path: Path) -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer(InferenceServerSpec(name="server-0", model_path=str(model_path)), TOKEN) as server:
        yield server


@pytest.fixture
async def http(server: EmbeddedServer) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=server.address, headers=headers, timeout=60, limits=limits) as client:
        yield client


def body(prompt: list[int], *, rid: str = "r", n: int = 1, **sampling: Any) -> dict[str, Any]:
    return {"rid": rid, "input_ids": prompt, "n": n, "sampling": {"max_new_tokens": 8, "ignore_eos": True, **sampling}}


async def generate(http: httpx.AsyncClient, prompt: list[int], **given: Any) -> GenerateAnswer:
    response = await http.post("/generate", json=body(prompt, **given))
    assert response.status_code == 200, response.text
    return GenerateAnswer.model_validate_json(response.content)


async def health(http: httpx.AsyncClient) -> HealthAnswer:
    return HealthAnswer.model_validate_json((await http.get("/health")).content)


async def until(http: httpx.AsyncClient, metric: str, count: int) -> None:
    """Ask until a metric has reached ``count``; the test's time limit bounds the wait."""
    while (await http.get("/metrics")).json()[metric] < count:
        pass


def forward_logprobs(model: Any, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> np.ndarray:
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        scores = torch.log_softmax(model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / temperature, -1)
    return scores.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()


def write(tmp_path: Path, model: Any, version: int, incarnation: int = 0) -> Manifest:
    writer = make_writer(TransportKind.DISK, run_id="test", directory=tmp_path / "weights")
    return writer.write(version, incarnation, ((n, t.detach()) for n, t in model.named_parameters()))


async def stage(http: httpx.AsyncClient, manifest: Manifest) -> httpx.Response:
    return await http.post("/weights/stage", json={"manifest": manifest.model_dump(mode="json")})


async def commit(http: httpx.AsyncClient, version: int, mode: str = "keep", incarnation: int = 0) -> httpx.Response:
    return await http.post("/weights/commit", json={"incarnation": incarnation, "version": version, "mode": mode})


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["type"], error["message"]


async def test_an_answer_follows_the_wire_and_the_model(http: httpx.AsyncClient) -> None:
    answer = await generate(http, [3, 4, 5], rid="mine", temperature=0.7, seed=3, max_new_tokens=20)
    (output,) = answer.outputs
    assert answer.rid == "mine"
    assert [(s.version, s.start, s.end) for s in output.spans] == [(0, 0, 20)]
    assert output.stop_reason is StopReason.LENGTH
    expected = forward_logprobs(build_model(0), [3, 4, 5], output.token_ids, 0.7)
    np.testing.assert_allclose(output.logprobs, expected, atol=1e-5)
    assert 0 <= answer.seconds_to_first_token <= answer.seconds


async def test_256_at_once_of_all_lengths_are_what_each_is_alone(
    server: EmbeddedServer, http: httpx.AsyncClient
) -> None:
    prompts = [[2 + (i * 7 + j) % 45 for j in range(1 + i % 23)] for i in range(256)]
    # aiohttp, as our client: httpx looks through all of its connections for every request
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.address, headers=http.headers, connector=connector) as session:

        async def ask(i: int) -> GenerateAnswer:
            async with session.post("/generate", json=body(prompts[i], seed=i, max_new_tokens=1 + i % 17)) as response:
                return GenerateAnswer.model_validate_json(await response.read())

        together = await asyncio.gather(*(ask(i) for i in range(256)))
    for i in range(0, 256, 37):
        alone = await generate(http, prompts[i], seed=i, max_new_tokens=1 + i % 17)
        assert alone.outputs[0].token_ids == together[i].outputs[0].token_ids
    model = build_model(0)
    for prompt, answer in zip(prompts, together, strict=True):
        output = answer.outputs[0]
        np.testing.assert_allclose(output.logprobs, forward_logprobs(model, prompt, output.token_ids), atol=1e-5)


async def test_siblings_come_in_one_answer(http: httpx.AsyncClient) -> None:
    answer = await generate(http, [3, 4], n=5, seed=1)
    assert len({tuple(o.token_ids) for o in answer.outputs}) == 5
    again = await generate(http, [3, 4], n=5, seed=1)
    assert [o.token_ids for o in again.outputs] == [o.token_ids for o in answer.outputs]


async def test_a_stop_string_keeps_its_tokens(http: httpx.AsyncClient) -> None:
    free = (await generate(http, [3, 4], seed=1, max_new_tokens=12)).outputs[0]
    stop = "".join({0: "<bos>", 1: "<eos>"}.get(t, f"w{t}") for t in free.token_ids[4:6])
    stopped = (await generate(http, [3, 4], seed=1, max_new_tokens=12, stop=[stop])).outputs[0]
    assert stopped.token_ids == free.token_ids[:6]
    assert stopped.stop_reason is StopReason.STOP


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}])
async def test_every_path_asks_for_the_token(server: EmbeddedServer, header: dict[str, str]) -> None:
    async with httpx.AsyncClient(base_url=server.address, headers=header) as stranger:
        for response in (await stranger.get("/health"), await stranger.post("/generate", json=body([3]))):
            assert error_of(response)[:2] == (401, "Unauthorized")


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (body([]), "at least one token"),
        (body([48]), "vocabulary"),
        (body([3] * CONTEXT), "leave room"),
        (body([3], max_new_tokens=0), "sampling.max_new_tokens"),
        (body([3], temperature=-1), "sampling.temperature"),
        (body([3], top_p=0), "sampling.top_p"),
        (body([3], beam=4), "sampling.beam"),
        (body(["x"]), "input_ids.0"),
        ({"input_ids": [3]}, "rid"),
        ("not json", "Invalid JSON"),
    ],
)
async def test_a_bad_request_is_a_clear_400_and_harms_nobody(http: httpx.AsyncClient, sent: Any, said: str) -> None:
    good = asyncio.create_task(generate(http, [3, 4], seed=5, max_new_tokens=60))
    content = {"content": sent} if isinstance(sent, str) else {"json": sent}
    status, kind, message = error_of(await http.post("/generate", **content))
    assert (status, kind) == (400, "RequestError")
    assert said in message
    unharmed = (await good).outputs[0]
    alone = (await generate(http, [3, 4], seed=5, max_new_tokens=60)).outputs[0]
    assert unharmed.token_ids == alone.token_ids
    np.testing.assert_allclose(unharmed.logprobs, alone.logprobs, atol=1e-5)


async def test_unknown_paths_and_bodies(http: httpx.AsyncClient) -> None:
    assert (await http.get("/nowhere")).status_code == 404
    assert (await http.get("/generate")).status_code in (404, 405)
    status, kind, message = error_of(await http.post("/pause", json={"incarnation": 0, "mode": "often"}))
    assert (status, kind) == (400, "RequestError") and "mode" in message


async def test_a_commit_under_keep_splits_the_answer_and_signs_a_true_receipt(
    server: EmbeddedServer, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    manifest = write(tmp_path, build_model(1), version=1)
    running = asyncio.create_task(generate(http, [3, 4, 5], seed=5, n=2, max_new_tokens=LONG))
    await until(http, "generated_tokens", 10)
    staged = StageAnswer.model_validate_json((await stage(http, manifest)).content)
    receipt = CommitReceipt.model_validate_json((await commit(http, 1)).content)
    answer = await running
    assert (staged.version, staged.bytes) == (1, manifest.total_bytes)
    assert (receipt.server, receipt.version, receipt.incarnation) == ("server-0", 1, 0)
    assert receipt.digest == manifest.digest
    assert receipt.bytes == manifest.total_bytes
    assert receipt.interrupted_requests == 1
    assert 0 < receipt.seconds_paused < 10
    old, new = build_model(0), build_model(1)
    for output in answer.outputs:
        first, second = output.spans
        assert (first.version, first.start, second.version, second.end) == (0, 0, 1, LONG)
        assert first.end == second.start
        cut = first.end
        by_old = forward_logprobs(old, [3, 4, 5], output.token_ids)
        np.testing.assert_allclose(output.logprobs[:cut], by_old[:cut], atol=1e-4)
        by_new = forward_logprobs(new, [3, 4, 5], output.token_ids)
        assert np.abs(by_new[cut:] - output.logprobs[cut:]).max() > 0.01

    held = DigestAnswer.model_validate_json((await http.get("/weights/digest")).content)
    assert (held.version, held.digest) == (1, manifest.digest)
    later = (await generate(http, [3, 4, 5], seed=6)).outputs[0]
    np.testing.assert_allclose(later.logprobs, forward_logprobs(new, [3, 4, 5], later.token_ids), atol=1e-5)
    assert [s.version for s in later.spans] == [1]


async def test_a_commit_under_recompute_goes_on_as_if_the_prefix_were_new(
    server: EmbeddedServer, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    await stage(http, write(tmp_path, build_model(1), version=1))
    running = asyncio.create_task(generate(http, [3, 4, 5], seed=5, max_new_tokens=LONG))
    await until(http, "generated_tokens", 10)
    receipt = CommitReceipt.model_validate_json((await commit(http, 1, "recompute")).content)
    output = (await running).outputs[0]
    assert receipt.interrupted_requests == 1
    cut = output.spans[0].end
    by_new = forward_logprobs(build_model(1), [3, 4, 5], output.token_ids)
    np.testing.assert_allclose(output.logprobs[cut:], by_new[cut:], atol=1e-4)


async def test_a_commit_under_drain_interrupts_nobody(
    server: EmbeddedServer, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    await stage(http, write(tmp_path, build_model(1), version=1))
    running = asyncio.create_task(generate(http, [3, 4, 5], seed=5, max_new_tokens=100))
    await until(http, "generated_tokens", 5)
    receipt = CommitReceipt.model_validate_json((await commit(http, 1, "drain")).content)
    assert receipt.interrupted_requests == 0
    assert [s.version for s in (await running).outputs[0].spans] == [0]


async def test_what_does_not_fit_is_refused_and_generation_goes_on(http: httpx.AsyncClient, tmp_path: Path) -> None:
    other = LlamaForCausalLM(copy.deepcopy(build_model(0).config)).eval()
    with torch.no_grad():
        other.model.norm.weight.mul_(2)
    manifest = write(tmp_path, other, version=1)
    damaged = manifest.tensors[0].model_copy(update={"digest": "0" * len(manifest.tensors[0].digest)})
    for broken in (
        manifest.model_copy(update={"tensors": manifest.tensors[1:]}),
        manifest.model_copy(update={"tensors": (damaged, *manifest.tensors[1:])}),
        manifest.model_copy(update={"location": str(tmp_path / "gone")}),
    ):
        status, kind, _ = error_of(await stage(http, broken))
        assert (status, kind) == (409, "WeightUpdateError")
    status, kind, message = error_of(await commit(http, 1))
    assert (status, kind) == (409, "WeightUpdateError") and "stage" in message
    answer = await generate(http, [3, 4], seed=1)
    assert [s.version for s in answer.outputs[0].spans] == [0]
    assert (await health(http)).version == 0


async def test_older_callers_are_refused(http: httpx.AsyncClient, tmp_path: Path) -> None:
    model = build_model(1)
    await stage(http, write(tmp_path, model, version=5, incarnation=2))
    assert (await commit(http, 5, incarnation=2)).status_code == 200
    old = {"incarnation": 1}
    refused = [
        await http.post("/pause", json=old),
        await http.post("/resume", json=old),
        await stage(http, write(tmp_path, model, version=6, incarnation=1)),
        await stage(http, write(tmp_path, model, version=4, incarnation=2)),
        await commit(http, 6, incarnation=1),
        await commit(http, 4, incarnation=2),
    ]
    assert {error_of(r)[:2] for r in refused} == {(409, "StaleCommand")}
    # a restored run goes back in versions under a new incarnation
    manifest = write(tmp_path, build_model(2), version=3, incarnation=3)
    await stage(http, manifest)
    receipt = CommitReceipt.model_validate_json((await commit(http, 3, incarnation=3)).content)
    assert (receipt.version, receipt.digest) == (3, manifest.digest)
    assert (await health(http)).incarnation == 3


async def test_a_commit_whose_answer_was_lost_may_be_repeated(http: httpx.AsyncClient, tmp_path: Path) -> None:
    await stage(http, write(tmp_path, build_model(1), version=1))
    first = (await commit(http, 1)).json()
    assert (await commit(http, 1)).json() == first


async def test_pause_queues_and_resume_serves(server: EmbeddedServer, http: httpx.AsyncClient) -> None:
    running = asyncio.create_task(generate(http, [3], rid="running", seed=1, max_new_tokens=250))
    await until(http, "generated_tokens", 2)
    for _ in range(2):
        paused = PauseAnswer.model_validate_json((await http.post("/pause", json={"incarnation": 0})).content)
        assert (paused.paused, paused.in_flight) == (True, 1)
    queued = asyncio.create_task(generate(http, [4], rid="queued", max_new_tokens=1))
    await until(http, "queued", 1)
    now = await health(http)
    assert (now.status, now.paused, now.in_flight, now.queued) == ("ok", True, 1, 1)
    for _ in range(2):
        assert not (await http.post("/resume", json={"incarnation": 0})).json()["paused"]
    assert len((await running).outputs[0].token_ids) == 250
    assert len((await queued).outputs[0].token_ids) == 1


async def test_abort_answers_with_what_it_has(server: EmbeddedServer, http: httpx.AsyncClient) -> None:
    asked = {rid: asyncio.create_task(generate(http, [3], rid=rid, max_new_tokens=250)) for rid in ("a", "b", "c")}
    await until(http, "generated_tokens", 9)
    assert (await http.post("/pause", json={"incarnation": 0})).status_code == 200
    assert (await http.post("/abort", json={"rids": ["a", "nobody"]})).json() == {"aborted": 1}
    (output,) = (await asked["a"]).outputs
    assert output.stop_reason is StopReason.ABORT
    assert 0 < len(output.token_ids) == output.spans[-1].end < 250
    assert (await http.post("/abort", json={})).json() == {"aborted": 2}
    assert {(await asked[rid]).outputs[0].stop_reason for rid in "bc"} == {StopReason.ABORT}
    assert (await http.post("/abort", json={})).json() == {"aborted": 0}


async def test_a_client_that_goes_away_makes_room(server: EmbeddedServer, http: httpx.AsyncClient) -> None:
    assert (await http.post("/pause", json={"incarnation": 0})).status_code == 200
    with pytest.raises(httpx.ReadTimeout):
        await http.post("/generate", json=body([3], max_new_tokens=250), timeout=0.2)
    await until(http, "aborted_requests", 1)
    now = await health(http)
    assert (now.in_flight, now.queued) == (0, 0)


async def test_a_drain_whose_caller_goes_away_is_withdrawn(
    server: EmbeddedServer, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    await stage(http, write(tmp_path, build_model(1), version=1))
    endless = asyncio.create_task(generate(http, [3], rid="endless", n=200, max_new_tokens=250))
    await until(http, "generated_tokens", 300)
    with pytest.raises(httpx.ReadTimeout):
        await http.post("/weights/commit", json={"incarnation": 0, "version": 1, "mode": "drain"}, timeout=0.1)
    served = await generate(http, [4], max_new_tokens=1)
    assert [s.version for s in served.outputs[0].spans] == [0]
    await http.post("/abort", json={"rids": ["endless"]})
    await endless
    assert (await health(http)).version == 0


async def test_a_failed_step_is_a_500_and_health_says_why(server: EmbeddedServer, http: httpx.AsyncClient) -> None:
    def explode(*_: object) -> None:
        raise RuntimeError("kernel panic")

    server.service._engine._loop._runner.decode = explode  # type: ignore[assignment]
    answers = await asyncio.gather(*(http.post("/generate", json=body([3])) for _ in range(3)))
    assert {error_of(r)[:2] for r in answers} == {(500, "InfrastructureError")}
    now = await health(http)
    assert now.status == "failed" and "kernel panic" in now.reason
    assert error_of(await http.post("/generate", json=body([3])))[0] == 500
    assert error_of(await http.post("/pause", json={"incarnation": 0}))[0] == 500
    assert "kernel panic" in await server.wait_failed()


async def test_metrics_are_numbers(http: httpx.AsyncClient) -> None:
    await generate(http, [3, 4], max_new_tokens=5)
    metrics = (await http.get("/metrics")).json()
    assert all(isinstance(value, int | float) for value in metrics.values())
    assert (metrics["generated_tokens"], metrics["prompt_tokens"], metrics["finished_requests"]) == (5, 2, 1)
