"""A model folder's tokenizer, without importing transformers or torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from areal_like.errors import ConfigError
from areal_like.rollout.chat_template import ChatTemplate

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class FastTokenizer:
    """Satisfies :class:`~areal_like.api.Tokenizer` over the ``tokenizers`` library.

    Ids and text are those of ``transformers.AutoTokenizer`` for folders with a ``tokenizer.json``, except that decoding
    never cleans spaces up: text is only looked at here, and it should show what was written.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        template: ChatTemplate | None,
        where: str,
    ) -> None:
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._template = template
        self._where = where

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._special_id("pad_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self._backend.get_vocab_size())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text, without special tokens, on every core."""
        return [len(found.ids) for found in self._backend.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """Ids of a conversation; ``kwargs`` are variables of the template (``tools``, ``enable_thinking``, …).

        Raises:
            ValueError: the model has no chat template, or its template refuses these messages.
        """
        if self._template is None:
            raise ValueError(f"{self._where} has no chat template; give prompts as text, or a model that has one")
        text = self._template.render(messages, add_generation_prompt=add_generation_prompt, **kwargs)
        return self.encode(text, add_special_tokens=False)

    def _special_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def load_tokenizer(path: str | Path) -> FastTokenizer:
    """Load the tokenizer of a Hugging Face model folder: ``tokenizer.json``, and what lies beside it.

    ``tokenizer_config.json`` names special tokens and may hold the chat template; ``chat_template.jinja`` wins over it.
    What is added around a text is up to ``tokenizer.json`` (transformers, too, ignores ``add_bos_token`` beside it).

    Raises:
        ConfigError: the folder or ``tokenizer.json`` is missing, a file is malformed, or a special token has no id.
    """
    folder = Path(path)
    file = folder / "tokenizer.json"
    if not file.is_file():
        found = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else None
        holds = "there is no such folder" if found is None else f"it holds {', '.join(found) or 'nothing'}"
        raise ConfigError(
            f"model.path {folder}: no tokenizer.json ({holds}); save one with transformers' AutoTokenizer and "
            f"save_pretrained"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for whatever it cannot parse
        raise ConfigError(f"{file}: cannot be read as a tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    try:
        return _with_config(backend, folder, file)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{folder}: a file beside {file.name} is malformed: {error!r}") from error


def _with_config(backend: tokenizers.Tokenizer, folder: Path, file: Path) -> FastTokenizer:
    """The tokenizer with what lies beside its file: special tokens and the chat template."""
    config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    _add_missing_tokens(backend, config.get("added_tokens_decoder") or {})
    special = {name: _text(config[name]) for name in _SPECIAL_NAMES if config.get(name) is not None}
    for name, token in special.items():
        if backend.token_to_id(token) is None:
            raise ConfigError(f"{folder}: {name} is {token!r}, which {file.name} has no id for")
    source = _template_source(folder, config)
    template = None if source is None else ChatTemplate(source, special, where=str(folder))
    return FastTokenizer(backend, special, template, str(folder))


def _read_json(file: Path) -> dict[str, Any]:
    """The object in ``file``; empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected an object, not {type(content).__name__}")
    return content


def _text(token: Any) -> str:
    """A token is written as text, or as an object with its ``content``."""
    return str(token["content"] if isinstance(token, dict) else token)


def _add_missing_tokens(backend: tokenizers.Tokenizer, decoder: Mapping[str, Any]) -> None:
    """Tokens that only the config knows, in the order of their ids."""
    for _, entry in sorted(decoder.items(), key=lambda pair: int(pair[0])):
        if backend.token_to_id(_text(entry)) is None:
            flags = {
                k: v for k, v in entry.items() if k in ("single_word", "lstrip", "rstrip", "normalized", "special")
            }
            backend.add_tokens([tokenizers.AddedToken(_text(entry), **flags)])


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return None if template is None else str(template)
