"""How long files and functions may be, and what may stand in them (STYLE.md). Exceptions are named, with a reason."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.architecture.conftest import Source

LONGEST_FILE, MEDIAN_FILE = 400, 150
LONGEST_FUNCTION, LONG_FUNCTION = 80, 30
MOST_PARAMETERS = 7
MOST_PROTOCOL_METHODS = 7

#: path -> why it may be longer
LONG_FILES: dict[str, str] = {}
#: "path:function" -> why it may be longer
LONG_FUNCTIONS: dict[str, str] = {}
#: "path:function" -> why it may take more parameters
WIDE_FUNCTIONS: dict[str, str] = {
    "areal_like/algo/logprobs.py:forward": "an autograd function takes tensors and settings positionally, one by one",
    "areal_like/algo/vocab_kernels.py:_scaled": "a Triton kernel takes pointers and numbers, and no records",
    "areal_like/algo/vocab_kernels.py:_softmax_forward": "a Triton kernel takes pointers and numbers, and no records",
    "areal_like/algo/vocab_kernels.py:_softmax_backward": "a Triton kernel takes pointers and numbers, and no records",
    "areal_like/weights/digest_kernel.py:_add_rows": "a Triton kernel takes pointers and numbers, and no records",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(source: Source) -> Iterator[tuple[str, Function]]:
    for node in ast.walk(source.tree):
        if isinstance(node, Function):
            yield f"{source.where}:{node.name}", node


def length(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def test_files_are_short(sources: list[Source], scripts: list[Source]) -> None:
    lengths = {source.where: source.text.count("\n") for source in [*sources, *scripts]}
    too_long = {path: n for path, n in lengths.items() if n > LONGEST_FILE and path not in LONG_FILES}
    assert too_long == {}
    assert statistics.median(n for n in lengths.values() if n) <= MEDIAN_FILE


def test_functions_are_short(sources: list[Source], scripts: list[Source]) -> None:
    lengths = {name: length(function) for source in [*sources, *scripts] for name, function in functions(source)}
    too_long = {name: n for name, n in lengths.items() if n > LONGEST_FUNCTION and name not in LONG_FUNCTIONS}
    assert too_long == {}
    ninth_tenth = statistics.quantiles(lengths.values(), n=10)[-1]
    assert ninth_tenth <= LONG_FUNCTION


def test_functions_take_few_parameters(sources: list[Source], scripts: list[Source]) -> None:
    counted = {name: _parameters(function) for source in [*sources, *scripts] for name, function in functions(source)}
    assert {name: n for name, n in counted.items() if n > MOST_PARAMETERS and name not in WIDE_FUNCTIONS} == {}


def test_every_exception_is_still_needed(sources: list[Source], scripts: list[Source]) -> None:
    everything = [*sources, *scripts]
    lines = {source.where: source.text.count("\n") for source in everything}
    found = {name: function for source in everything for name, function in functions(source)}
    assert all(lines[path] > LONGEST_FILE for path in LONG_FILES)
    assert all(length(found[name]) > LONGEST_FUNCTION for name in LONG_FUNCTIONS)
    assert all(_parameters(found[name]) > MOST_PARAMETERS for name in WIDE_FUNCTIONS)


def test_protocols_are_small(sources: list[Source]) -> None:
    wide = {
        f"{source.where}:{node.name}": count
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases)
        if (count := sum(isinstance(entry, Function) for entry in node.body)) > MOST_PROTOCOL_METHODS
    }
    assert wide == {}


def _parameters(function: Function) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    own = 1 if named and named[0].arg in ("self", "cls") else 0
    return len(named) - own
