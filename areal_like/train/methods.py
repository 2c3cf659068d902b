"""The trainer's methods, declared once for both ends: how arguments reach the ranks, and whose result counts.

:class:`TrainMethods` is implemented by the worker of every rank; the controller's ``TrainerGroup`` has the same methods
as coroutines and reads the declarations to make the calls. Imports no torch.
"""

from __future__ import annotations

import inspect
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter

from areal_like.api.trajectory import Batch, UpdateReport
from areal_like.api.weights import Manifest

F = TypeVar("F", bound=Callable[..., Any])


class Split(StrEnum):
    """How arguments are divided: the same for every rank, or by key: each rank fetches its share from the store."""

    SAME = "same"
    BY_KEY = "by_key"


class Collect(StrEnum):
    """Whose result counts: that of rank 0 (the ranks agree, or only rank 0 has one), or one of every rank."""

    FIRST = "first"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    split: Split
    collect: Collect


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodForm:
    """A declared method: its dispatch, and how its arguments and its result become plain values and back."""

    name: str
    dispatch: Dispatch
    arguments: Mapping[str, TypeAdapter[Any]]
    result: TypeAdapter[Any]

    def dump(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.arguments[name].dump_python(value) for name, value in arguments.items()}

    def load(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.arguments[name].validate_python(value) for name, value in arguments.items()}


def dispatch(*, split: Split = Split.SAME, collect: Collect = Collect.FIRST) -> Callable[[F], F]:
    """Declare how a method is spread over ranks."""

    def mark(function: F) -> F:
        function.__dispatch__ = Dispatch(split=split, collect=collect)  # type: ignore[attr-defined]
        return function

    return mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Where a rank is. ``data_rank`` of ``data_size`` says which share of a batch it takes."""

    rank: int
    world_size: int
    data_rank: int
    data_size: int
    device: str
    host: str
    pid: int
    health_address: str


class TrainMethods(ABC):
    """What a train worker can be asked, by all ranks at once: each method is collective."""

    @abstractmethod
    @dispatch(collect=Collect.ALL)
    def coordinates(self) -> Coordinates:
        """Where this rank is."""

    @abstractmethod
    @dispatch(split=Split.BY_KEY)
    def update(self, batch: Batch) -> UpdateReport:
        """Consume ``batch`` and make the version after ``batch.version``.

        Raises:
            ValueError: the trainer does not hold ``batch.version``.
        """

    @abstractmethod
    @dispatch()
    def export_weights(self, version: int, incarnation: int) -> Manifest:
        """Lay the current weights out for the servers (rank 0 writes) and say where.

        Raises:
            ValueError: the trainer does not hold ``version``.
        """

    @abstractmethod
    @dispatch()
    def save_hf(self, directory: str) -> str:
        """Write a Hugging Face checkpoint, complete or not at all (rank 0 writes). Returns the directory."""

    @abstractmethod
    @dispatch()
    def save_snapshot(self) -> str:
        """Copy what training needs to go on, and write it in the background; waits for the one before it.

        Returns where it will be. Every rank writes its shards.
        """

    @abstractmethod
    @dispatch()
    def finish_snapshot(self) -> None:
        """Wait until the last snapshot is durable under its name; raises what its writing raised."""

    @abstractmethod
    @dispatch()
    def load_snapshot(self, directory: str) -> int:
        """Go on from a snapshot, of any number of ranks. Returns its version.

        Raises:
            ConfigError: it cannot be read, or is of another model.
        """


@cache
def method_forms() -> Mapping[str, MethodForm]:
    """Every declared method of :class:`TrainMethods` by name."""
    forms = {}
    for name, function in inspect.getmembers(TrainMethods, inspect.isfunction):
        declared = getattr(function, "__dispatch__", None)
        if declared is None:
            continue
        hints = typing.get_type_hints(function)
        result = hints.pop("return")
        forms[name] = MethodForm(
            name=name,
            dispatch=declared,
            arguments={argument: TypeAdapter(hint) for argument, hint in hints.items()},
            result=TypeAdapter(result),
        )
    return forms
