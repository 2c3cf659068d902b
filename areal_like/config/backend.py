"""The ``name:d4t2`` notation for an engine and how it is spread over devices."""

from __future__ import annotations

import re
from dataclasses import dataclass

_DIMENSIONS = {"d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """An engine name and its parallel sizes, all 1 unless named."""

    name: str
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    @property
    def devices_per_server(self) -> int:
        return self.tensor * self.pipeline

    @property
    def world_size(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    def __str__(self) -> str:
        sizes = "".join(f"{k}{getattr(self, v)}" for k, v in _DIMENSIONS.items() if getattr(self, v) != 1 or k == "d")
        return f"{self.name}:{sizes}"


def parse_backend(text: str, known: tuple[str, ...]) -> BackendSpec:
    """Parse ``name:d<data>t<tensor>p<pipeline>c<context>e<expert>``.

    Raises:
        ValueError: the name is not in ``known``, or the sizes do not parse, repeat, or are below 1.
    """
    name, _, sizes = text.partition(":")
    if name not in known:
        raise ValueError(f"unknown backend {name!r}; known: {', '.join(known)}")
    parts = re.findall(r"([a-z])(\d+)", sizes)
    if "".join(f"{k}{v}" for k, v in parts) != sizes:
        raise ValueError(f"sizes {sizes!r} do not parse; expected letters d t p c e with a number each, as in 'd4t2'")
    given: dict[str, int] = {}
    for letter, number in parts:
        if letter not in _DIMENSIONS or _DIMENSIONS[letter] in given or int(number) < 1:
            raise ValueError(f"size {letter}{number} of {text!r} is unknown, repeated or below 1")
        given[_DIMENSIONS[letter]] = int(number)
    return BackendSpec(name=name, **given)
