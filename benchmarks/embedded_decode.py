"""Tokens per second of the embedded engine beside a bare batched ``model.forward`` loop, all in one run.

    python benchmarks/embedded_decode.py [--concurrency 1 32 256] [--seconds 5] [--out result.json]

Three roads to the same tokens, for each concurrency C:

* bare: C rows, one forward per token with transformers' own DynamicCache, argmax; nothing joins, nothing leaves;
* direct: the engine's thread, C requests in flight, each replaced as it ends;
* http: the same through the server's port; client (aiohttp) and server are two processes.

Prompts of ``--prompt`` tokens, answers of ``--answer`` tokens, temperature 1, a Llama of about a million parameters.
A fourth figure, ``short``, is requests per second of 5 to 12 prompt tokens with one-token answers: a game's turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import platform
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from areal_like.api.wire import GenerateBody, SamplingBody
from areal_like.inference.embedded.allocator import keep_freed_memory
from areal_like.inference.embedded.engine import DecodeEngine
from areal_like.inference.embedded.loop import DecodeLoop
from areal_like.inference.embedded.model import ModelRunner, cache_token_bytes
from areal_like.inference.embedded.requests import Request, RequestLimits, make_request
from areal_like.inference.embedded.server import run_server
from areal_like.inference.embedded.slots import CacheShape
from areal_like.inference.spec import InferenceServerSpec
from benchmarks.demo_runs import leave_on_signals, write_result
from launcher.child import die_with_parent

TOKEN = "benchmark"
CONTEXT = 1024


def build_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def bare(model: Any, rows: int, prompt: int, answer: int, seconds: float) -> float:
    """Tokens per second of a bare batched loop: whole rounds of ``answer`` tokens until ``seconds`` have passed."""
    ids = torch.randint(2, 1000, (rows, prompt))
    written = 0
    started = time.perf_counter()
    with torch.inference_mode():
        while time.perf_counter() - started < seconds:
            cache = DynamicCache(config=model.config)
            tokens = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
            for _ in range(answer - 1):
                tokens = model(input_ids=tokens, past_key_values=cache).logits[:, -1:].argmax(-1)
            written += rows * answer
    return written / (time.perf_counter() - started)


class DirectLoad:
    """Keeps ``concurrency`` requests in flight on an engine, from the engine's own thread."""

    def __init__(self, model: Any, body: Callable[[], GenerateBody], concurrency: int) -> None:
        self._body = body
        self._concurrency = concurrency
        self._limits = RequestLimits(vocabulary=1024, context_length=CONTEXT, eos_ids=frozenset(), decoder=None)
        shape = CacheShape(max_rows=256, token_bytes=cache_token_bytes(model), max_bytes=2**31)
        loop = DecodeLoop(ModelRunner(model, device=torch.device("cpu")), shape)
        self.engine = DecodeEngine(loop, deliver=self._replace)
        self._stop = False
        self._left = threading.Semaphore(0)

    def _submit(self) -> None:
        self.engine.submit(make_request(self._body(), self._limits, default_seed=lambda: 1, now=time.monotonic()))

    def _replace(self, finished: list[Request]) -> None:
        for _ in finished:
            if self._stop:
                self._left.release()
            else:
                self._submit()

    def tokens_per_second(self, seconds: float) -> float:
        with self.engine:
            for _ in range(self._concurrency):
                self._submit()
            time.sleep(min(1.0, seconds / 4))
            before, started = self.engine.statistics().generated_tokens, time.perf_counter()
            time.sleep(seconds)
            after, ended = self.engine.statistics().generated_tokens, time.perf_counter()
            self._stop = True
            for _ in range(self._concurrency):
                self._left.acquire()
        return (after - before) / (ended - started)


async def over_http(
    address: str, body: Callable[[], GenerateBody], concurrency: int, seconds: float
) -> dict[str, float]:
    """Tokens and requests per second of ``concurrency`` clients that each ask again as soon as they are answered."""
    counts = {"tokens": 0, "requests": 0}
    warm = time.perf_counter() + min(1.0, seconds / 4)
    end = warm + seconds

    async def ask(session: aiohttp.ClientSession) -> None:
        while (now := time.perf_counter()) < end:
            async with session.post(address + "/generate", data=body().model_dump_json()) as answer:
                got = json.loads(await answer.read())
            if now >= warm:
                counts["requests"] += 1
                counts["tokens"] += len(got["outputs"][0]["token_ids"])

    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session, asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(ask(session))
    elapsed = time.perf_counter() - warm
    return {name: count / elapsed for name, count in counts.items()}


def make_body(rng: random.Random, prompt: tuple[int, int], answer: int) -> Callable[[], GenerateBody]:
    def body() -> GenerateBody:
        ids = [rng.randrange(2, 1000) for _ in range(rng.randint(*prompt))]
        sampling = SamplingBody(max_new_tokens=answer, seed=rng.getrandbits(63), ignore_eos=True)
        return GenerateBody(rid="", input_ids=ids, sampling=sampling)

    return body


def _serve(model_path: str, pipe: Any) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    run_server(InferenceServerSpec(name="benchmark", model_path=model_path), TOKEN, pipe.send)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    keep_freed_memory()  # as the server does, for the bare loop too
    torch.set_num_threads(1)
    rng = random.Random(0)
    long, short = make_body(rng, (args.prompt, args.prompt), args.answer), make_body(rng, (5, 12), 1)
    model = build_model()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        server = context.Process(target=_serve, args=(str(Path(folder)), theirs))
        server.start()
        address = ours.recv()
        try:
            for c in args.concurrency:
                row = {"concurrency": c, "bare": bare(model, c, args.prompt, args.answer, args.seconds)}
                row["direct"] = DirectLoad(model, long, c).tokens_per_second(args.seconds)
                row["http"] = asyncio.run(over_http(address, long, c, args.seconds))["tokens"]
                row["direct_to_bare"] = row["direct"] / row["bare"]
                row["http_to_bare"] = row["http"] / row["bare"]
                row["short_requests_per_second"] = asyncio.run(over_http(address, short, c, args.seconds))["requests"]
                rows.append(row)
                print({k: round(v, 2) for k, v in row.items()}, flush=True)
        finally:
            server.terminate()
            server.join()
    parameters = sum(p.numel() for p in model.parameters())
    return {"parameters": parameters, "machine": platform.processor() or platform.machine(), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--prompt", type=int, default=16, help="tokens per prompt")
    parser.add_argument("--answer", type=int, default=64, help="tokens per answer")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds per measurement")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args()
    leave_on_signals()
    result = measure(args)
    print(json.dumps(result, indent=2))
    if args.out:
        write_result(args.out, result)


if __name__ == "__main__":
    main()
