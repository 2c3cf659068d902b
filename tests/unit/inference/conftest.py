"""A tiny random Llama with a word-level tokenizer, a loop around it, and its answers by another road: plain
transformers forwards over whole sequences, with transformers' own logits processors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from areal_like.api.wire import GenerateBody, SamplingBody
from areal_like.inference.embedded.loop import DecodeLoop
from areal_like.inference.embedded.model import ModelRunner, cache_token_bytes
from areal_like.inference.embedded.requests import Request, RequestLimits, make_request
from areal_like.inference.embedded.slots import CacheShape

VOCABULARY = 48
EOS = 1
CONTEXT = 64

MakeRequest = Callable[..., Request]
MakeLoop = Callable[..., DecodeLoop]
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Logprobs = Callable[..., list[float]]


def build_model(seed: int) -> Any:
    """About 9,000 parameters; wide initial weights, so that its distributions are far from uniform."""
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
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def model() -> Any:
    return build_model(seed=0)


@pytest.fixture
def other_model() -> Any:
    """The same shape with other weights."""
    return build_model(seed=1)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Token i is the word ``w<i>``, joined without spaces; 0 and 1 are special."""
    words = {"<bos>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    fast = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<bos>", eos_token="<eos>")


@pytest.fixture
def make(tokenizer: PreTrainedTokenizerFast) -> MakeRequest:
    """A checked request from a prompt and sampling parameters."""
    numbers = itertools.count()
    limits = RequestLimits(vocabulary=VOCABULARY, context_length=CONTEXT, eos_ids=frozenset({EOS}), decoder=tokenizer)

    def make(prompt: Sequence[int], *, n: int = 1, rid: str = "", **sampling: Any) -> Request:
        body = GenerateBody(
            rid=rid or f"r{next(numbers)}",
            input_ids=list(prompt),
            n=n,
            sampling=SamplingBody(**{"max_new_tokens": 8, "ignore_eos": True, **sampling}),
        )
        return make_request(body, limits, default_seed=lambda: 5, now=0.0)

    return make


@pytest.fixture
def make_loop(model: Any) -> MakeLoop:
    def make_loop(served: Any = model, *, max_rows: int = 256, max_bytes: int = 2**30) -> DecodeLoop:
        shape = CacheShape(max_rows=max_rows, token_bytes=cache_token_bytes(served), max_bytes=max_bytes)
        return DecodeLoop(ModelRunner(served, device=torch.device("cpu")), shape)

    return make_loop


def run_all(loop: DecodeLoop, *requests: Request, version: int = 0) -> None:
    """Enqueue and step until everything has ended."""
    for request in requests:
        loop.enqueue(request)
    while loop.running or loop.queued:
        loop.step(version, admit=True)


@pytest.fixture
def run() -> Callable[..., None]:
    return run_all


@pytest.fixture
def logprobs() -> Logprobs:
    """Log-probs of ``tokens`` after ``prompt``: one forward over the whole sequence, no cache, then ``processors``."""

    def logprobs(served: Any, prompt: Sequence[int], tokens: Sequence[int], *processors: Processor) -> list[float]:
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            logits = served(input_ids=ids).logits.float()
        found = []
        for i, token in enumerate(tokens):
            end = len(prompt) + i
            scores = logits[:, end - 1]
            for process in processors:
                scores = process(ids[:, :end], scores)
            found.append(float(torch.log_softmax(scores, -1)[0, token]))
        return found

    return logprobs


@pytest.fixture
def saved(model: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Iterator[Path]:
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    yield tmp_path / "model"
