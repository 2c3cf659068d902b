"""An engine that answers from a script, and small tokenizers, for tests of workflows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from areal_like.api import ModelRequest, ModelResponse, StopReason
from areal_like.rollout.tokenizer import FastTokenizer, load_tokenizer

Folder = Callable[[tokenizers.Tokenizer, str], FastTokenizer]


class ScriptedEngine:
    """Answers request n with the n-th list of ids; token t of it has log-prob -(t + 1) / 10 and version n."""

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        self.answers = answers
        self.requests: list[ModelRequest] = []

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        number = len(self.requests)
        self.requests.append(request)
        ids = list(self.answers[number])
        return ModelResponse(
            input_tokens=list(request.input_ids),
            output_tokens=ids,
            output_logprobs=[-(t + 1) / 10 for t in range(len(ids))],
            output_versions=[number] * len(ids),
            stop_reason=StopReason.STOP,
        )

    def get_version(self) -> int:
        return 0


@pytest.fixture
def scripted() -> type[ScriptedEngine]:
    return ScriptedEngine


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Writes a tokenizer and a chat template as a model folder, and loads it."""

    def write(backend: tokenizers.Tokenizer, template: str = "") -> FastTokenizer:
        backend.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>", "pad_token": "<pad>"}')
        if template:
            (tmp_path / "chat_template.jinja").write_text(template)
        return load_tokenizer(tmp_path)

    return write


@pytest.fixture
def letters(folder: Folder) -> FastTokenizer:
    """Ids: <pad> 0, <eos> 1, a 2, b 3, ab 4. Text "ab" is one token, although a model may write a and b."""
    vocab = {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3, "ab": 4}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<pad>", "<eos>"])
    return folder(backend, "")


@pytest.fixture
def guesses(folder: Folder) -> FastTokenizer:
    """The vocabulary of the demo: <pad> <bos> <eos> higher lower correct, then 0..4 as ids 6..10."""
    words = ["<pad>", "<bos>", "<eos>", "higher", "lower", "correct", *"01234"]
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(words[:3])
    return folder(backend, "")
