"""What a token costs vLLM's API server: asked at a path of ours, and at those of its own that tell ids and log-probs.

    python benchmarks/token_path.py [--python .venv-vllm-0.26/bin/python] [--requests 64] [--tokens 256] [--out FILE]

One server on the CPU, with a model so small that little but serving is left (one layer, SmolLM2's vocabulary and
tokenizer), and for each path in turns the same requests at once: microseconds of the API server's process per token
(user and system), bytes of answer per token, and tokens/s, which the engine's core shares two processes with here.
Paths: ``ours`` (``/areal_like/generate``), ``completions`` (``/v1/completions``), and, where this vLLM has it,
``generate`` (``/inference/v1/generate``). It needs vLLM (``make engines-vllm``) and ``make smollm2``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from areal_like.errors import ConfigError
from areal_like.inference.token_path import PATH
from benchmarks.demo_runs import ROOT, write_result
from benchmarks.gpu.live_runs import Served, engine_facts, limit_time, served
from benchmarks.gpu.refusals import check_limits, check_model

CONFIG = "configs/smollm2_vllm_cpu.yaml"
PROMPT = 32
_SAMPLING = {"temperature": 1.0, "ignore_eos": True}


def small_model(tokenizer: Path, folder: Path) -> Path:
    """One Llama layer of random weights over the tokenizer's vocabulary."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    found = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(found), hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=found.bos_token_id, eos_token_id=found.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    found.save_pretrained(folder)
    return folder


def body_of(path: str, number: int, turn: int, tokens: int) -> tuple[str, dict[str, Any]]:
    """The address and JSON of one seeded request for exactly ``tokens`` tokens."""
    ids = [100 + (7 * number + i) % 1000 for i in range(PROMPT)]
    sampling = {**_SAMPLING, "max_tokens": tokens, "seed": number}
    name = f"{path}-{turn}-{number}"
    if path == "ours":
        return PATH, {"request_id": name, "token_ids": ids, "sampling_params": sampling}
    sampling["logprobs"] = 0
    if path == "generate":
        return "/inference/v1/generate", {"request_id": name, "token_ids": ids, "sampling_params": sampling}
    told = {"model": "policy", "request_id": name, "prompt": ids, "return_token_ids": True}
    return "/v1/completions", {**told, **sampling}


def tokens_of(path: str, answer: Mapping[str, Any]) -> int:
    """How many ids came, each with a log-prob. Raises RuntimeError: one has none."""
    choice = answer if path == "ours" else answer["choices"][0]
    found = choice["logprobs"]
    logprobs = found if path == "ours" else found["token_logprobs" if path == "completions" else "content"]
    if len(logprobs) != len(choice["token_ids"]):
        raise RuntimeError(f"{path}: {len(choice['token_ids'])} ids with {len(logprobs)} log-probs")
    return len(choice["token_ids"])


def api_server(url: str) -> psutil.Process:
    """The process that listens there."""
    port = int(url.rpartition(":")[2])
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port]
    return psutil.Process(listening[0].pid)


async def turn(server: Served, path: str, number: int, requests: int, tokens: int) -> dict[str, float]:
    """``requests`` at once. Raises RuntimeError: one was refused, or is not whole."""
    process = api_server(server.url)
    before, began = process.cpu_times(), time.monotonic()
    headers = {"Authorization": f"Bearer {server.token}"}
    connector, patience = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(server.url, headers=headers, connector=connector, timeout=patience) as session:

        async def ask(i: int) -> bytes:
            where, body = body_of(path, i, number, tokens)
            async with session.post(where, json=body) as response:
                content = await response.read()
                if response.status != 200:
                    raise RuntimeError(f"{where}: {response.status}: {content[:300].decode(errors='replace')}")
                return content

        answers = await asyncio.gather(*map(ask, range(requests)))
    seconds, after = time.monotonic() - began, process.cpu_times()
    found = sum(tokens_of(path, json.loads(answer)) for answer in answers)
    if found != requests * tokens:
        raise RuntimeError(f"{path}: {found} tokens instead of {requests * tokens}")
    spent = after.user + after.system - before.user - before.system
    return {
        "microseconds_per_token": spent / found * 1e6,
        "bytes_per_token": sum(map(len, answers)) / found,
        "tokens_per_second": found / seconds,
    }


def measure(given: argparse.Namespace, facts: Mapping[str, Any]) -> dict[str, Any]:
    spans = facts["interrupt"] == "keep"  # and with them the switch of vLLM's own path
    paths = ["ours", "completions", "generate"]
    readings: dict[str, list[dict[str, float]]] = {path: [] for path in paths}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        overrides = [
            f"model.path={small_model(given.smollm2, folder / 'model')}", f"rollout.python={facts['python']}",
            f"rollout.interrupt={facts['interrupt']}", f"rollout.max_batch_size={given.requests}",
            f"rollout.context_length={PROMPT + given.tokens}",
            *(["vllm.enable_scale_out=true"] if spans else []),
        ]  # fmt: skip
        with served(CONFIG, overrides, log=folder / "server.log", timeout=300.0) as server:
            for repeat in range(given.repeats + 1):
                for path in paths if repeat % 2 else reversed(paths):
                    found = asyncio.run(turn(server, path, repeat, given.requests, given.tokens))
                    shown = {name: round(value, 1) for name, value in found.items()}
                    print(f"{path}{'' if repeat else ' (warms up)'}: {shown}", flush=True)
                    if repeat:
                        readings[path].append(shown)
    middle = {
        path: {name: round(median(r[name] for r in found), 1) for name in found[0]} for path, found in readings.items()
    }
    ours = middle["ours"]["microseconds_per_token"]
    return {
        "benchmark": "token_path", "engine": "vllm", "engine_version": facts["version"], "device": "cpu",
        "requests": given.requests, "prompt": PROMPT, "tokens": given.tokens, "median": middle,
        "times_ours": {path: round(found["microseconds_per_token"] / ours, 2) for path, found in middle.items()},
        "readings": readings,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="vLLM's interpreter; default: .venv-vllm's")
    parser.add_argument("--smollm2", type=Path, default=ROOT / "models" / "smollm2", help="whose tokenizer is used")
    parser.add_argument("--requests", type=int, default=64, help="at once")
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--repeats", type=int, default=2, help="turns of each path, after one that warms up")
    parser.add_argument("--seconds", type=float, default=550.0, help="hard limit of everything")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    for name in ("requests", "tokens", "repeats"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} {getattr(given, name)}: at least 1 is needed")
    check_limits(parser, given)
    check_model(parser, given.smollm2)
    try:
        facts = engine_facts("cpu", given.python)
    except ConfigError as error:
        parser.error(str(error))
    limit_time(given.seconds)
    found = measure(given, facts)
    print(json.dumps({"median": found["median"], "times_ours": found["times_ours"]}))
    if given.out is not None:
        write_result(given.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
