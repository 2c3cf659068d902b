"""Chat templates as Hugging Face models carry them: Jinja, run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from areal_like.errors import ConfigError


class _GenerationBlock(Extension):
    """``{% generation %} … {% endgeneration %}`` marks what the assistant wrote; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. ``special_tokens`` (``bos_token``, ``eos_token``, …) are its global words."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, where: str) -> None:
        """``where`` names the template's file in messages.

        Raises:
            ConfigError: the source does not parse.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"{where}: the chat template does not parse: {error.message} (line {error.lineno})"
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as text, ready to be tokenised without further special tokens.

        Raises:
            ValueError: the template refuses these messages.
        """
        variables = {**self._special_tokens, "tools": None, "documents": None, **variables}
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **variables
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
