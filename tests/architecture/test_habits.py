"""Words and habits that the code keeps: names, prints, module state, broad excepts, loose ends."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.architecture.conftest import Source

#: one word, one meaning (docs/glossary): these mean everything, so they are no names
FORBIDDEN_NAMES = {"sample", "samples", "item", "items"}
#: nor part of one
FORBIDDEN_PARTS = {"manager", "handler", "utils", "util", "helper", "helpers"}
#: names that a library gives
GIVEN_NAMES = {"exception_handler"}


def listed(wrong: Iterable[str]) -> str:
    return "\n" + "\n".join(sorted(wrong))


def names_of(source: Source) -> Iterator[tuple[str, int]]:
    """Every name that the module gives to something of its own."""
    for part in source.module.split("."):
        yield part, 1
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def parts(name: str) -> set[str]:
    """``RunManager`` and ``run_manager`` -> {run, manager}."""
    return {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def test_forbidden_words_are_no_names(sources: list[Source]) -> None:
    wrong = {
        f"{source.where}:{line} {name}"
        for source in sources
        for name, line in names_of(source)
        if name not in GIVEN_NAMES and (name.strip("_").lower() in FORBIDDEN_NAMES or parts(name) & FORBIDDEN_PARTS)
    }
    assert not wrong, listed(wrong)


def test_only_the_command_line_prints(sources: list[Source]) -> None:
    wrong = [
        f"{source.where}:{node.lineno}"
        for source in sources
        if source.package != "launcher"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not wrong, listed(wrong)


def test_modules_hold_no_state(sources: list[Source]) -> None:
    """No ``global``, and no list, dict or set at module level that is not a constant by its name."""
    wrong = []
    for source in sources:
        wrong += [f"{source.where}:{n.lineno} global" for n in ast.walk(source.tree) if isinstance(n, ast.Global)]
        for statement in source.tree.body:
            if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
                continue
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = [t.id for t in targets if isinstance(t, ast.Name)]
            if _is_mutable(statement.value) and any(not n.isupper() and n != "__all__" for n in names):
                wrong.append(f"{source.where}:{statement.lineno} {names[0]}")
    assert not wrong, listed(wrong)


def test_a_broad_except_gives_its_reason(sources: list[Source]) -> None:
    wrong = [
        f"{source.where}:{node.lineno}"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ExceptHandler) and _is_broad(node)
        if not _passes_on(node) and not _commented(source, node)
    ]
    assert not wrong, listed(wrong)


def test_engines_are_not_patched(sources: list[Source]) -> None:
    """No name of an engine's module or class is set; what makes SGLang start on a CPU is the one exception."""
    wrong = []
    for source in sources:
        if source.module.endswith("cpu_shims"):
            continue
        theirs = set(_names_from(source.tree, {"vllm", "sglang"}))
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _root(node) in theirs:
                wrong.append(f"{source.path}:{node.lineno} sets {ast.unparse(node)}")
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and _root(node.args[0]) in theirs:
                wrong.append(f"{source.path}:{node.lineno} {ast.unparse(node)}")
    assert not wrong, listed(wrong)


def test_a_patched_engine_would_be_seen() -> None:
    tree = ast.parse("from vllm.distributed import packed_tensor\npacked_tensor.torch = 1")
    (target,) = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    assert _root(target) in set(_names_from(tree, {"vllm"}))


def _names_from(tree: ast.AST, packages: set[str]) -> Iterator[str]:
    """Names that imports from ``packages`` bind, anywhere in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in packages:
                    yield alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in packages:
            yield from (alias.asname or alias.name for alias in node.names)


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_there_are_no_loose_ends(sources: list[Source], scripts: list[Source]) -> None:
    wrong = [
        f"{source.where}:{token.start[0]}"
        for source in [*sources, *scripts]
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline)
        if token.type == tokenize.COMMENT and re.search(r"\b(TODO|FIXME|XXX|HACK)\b", token.string)
    ]
    wrong += [
        f"{source.where}:{node.lineno} NotImplementedError"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Raise) and node.exc is not None and "NotImplementedError" in ast.unparse(node.exc)
    ]
    assert not wrong, listed(wrong)


def test_shipped_files_name_no_folder_of_the_machine_they_were_written_on(root: Path) -> None:
    shipped = [root / "README.md", root / "Makefile", *root.glob("docs/**/*.md"), *root.glob("configs/*.yaml")]
    shipped += [path for package in ("areal_like", "workflows", "launcher") for path in (root / package).rglob("*.py")]
    wrong = [
        str(path.relative_to(root))
        for path in shipped
        if path.is_file() and re.search(r"(?<![\w./])/(work|home|root|Users)/", path.read_text(encoding="utf-8"))
    ]
    assert not wrong, listed(wrong)


def _is_mutable(value: ast.expr) -> bool:
    if isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)):
        return True
    made_by = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
    return made_by.rpartition(".")[2] in {"list", "dict", "set", "deque", "defaultdict", "Counter", "OrderedDict"}


def _is_broad(node: ast.ExceptHandler) -> bool:
    return node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")


def _passes_on(node: ast.ExceptHandler) -> bool:
    """Cleans up and raises what came."""
    return any(isinstance(statement, ast.Raise) and statement.exc is None for statement in node.body)


def _commented(source: Source, node: ast.ExceptHandler) -> bool:
    lines = source.text.splitlines()
    return any("#" in line for line in lines[node.lineno - 2 : node.body[0].lineno])
