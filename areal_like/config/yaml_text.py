"""YAML as people write it in experiment files: ``1e-4`` is a number, a key said twice is an error, lines are known."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from areal_like.errors import ConfigError

#: PyYAML follows YAML 1.1, where a float needs a dot and a signed exponent, so ``1e-4`` would become a string
_FLOAT = re.compile(
    r"""^(?:[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?(?:[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)
        |[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?\.(?:inf|Inf|INF)
        |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")

_FLOAT_TAG = "tag:yaml.org,2002:float"
_BOOL_TAG = "tag:yaml.org,2002:bool"
_TIMESTAMP_TAG = "tag:yaml.org,2002:timestamp"
_MERGE_TAG = "tag:yaml.org,2002:merge"

#: values that a text may come to once its aliases are followed: a few aliases of aliases would fill any memory
_MOST_VALUES = 100_000


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's floats and booleans (``on`` and ``no`` are words) and without dates."""


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    replaced = {_FLOAT_TAG, _BOOL_TAG, _TIMESTAMP_TAG}
    kept = {
        first: [(tag, pattern) for tag, pattern in rules if tag not in replaced]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for first in "-+0123456789.":
        kept.setdefault(first, []).insert(0, (_FLOAT_TAG, _FLOAT))
    for first in "tTfF":
        kept.setdefault(first, []).insert(0, (_BOOL_TAG, _BOOL))
    return kept


_Loader.yaml_implicit_resolvers = _resolvers()


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlDocument:
    """A parsed mapping. ``lines`` gives the line (from 1) of every dotted path that the text names."""

    source: str
    tree: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)


def parse_scalar(text: str, *, source: str) -> Any:
    """The YAML value of ``text``: ``1e-4`` -> float, ``[1, 2]`` -> list, ``null`` -> None, ``abc`` -> str.

    Raises:
        ConfigError: the text is no YAML value, or says a key twice; ``source`` names it in the message.
    """
    try:
        return _load(text, source=source)[1]
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: {_problem(error)}") from None


def parse_yaml(text: str, *, source: str) -> YamlDocument:
    """Parse the text of an experiment file.

    Raises:
        ConfigError: a syntax error (with its line), a key said twice, or a document that is no mapping.
    """
    try:
        node, tree, lines = _load(text, source=source)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}{_place(error, text)}: YAML syntax error: {_problem(error)}") from None
    if node is None:
        raise ConfigError(f"{source}: the file is empty; expected sections such as 'model:' and 'train_dataset:'")
    if not isinstance(node, yaml.MappingNode):
        found = "a list" if isinstance(node, yaml.SequenceNode) else "a plain value"
        raise ConfigError(f"{source}:1: expected 'key: value' lines at the top level, got {found}")
    return YamlDocument(source=source, tree=tree, lines=lines)


def _load(text: str, *, source: str) -> tuple[yaml.Node | None, Any, dict[str, int]]:
    """The one document of ``text``: its root (None if there is none), its value, and the lines of its paths.

    Raises:
        YAMLError: a syntax error.
        ConfigError: a key said twice or no text, a value unlike its tag, or more of them than any experiment has.
    """
    lines: dict[str, int] = {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, None, lines
        if _count_values(node, {}, source) > _MOST_VALUES:
            raise ConfigError(f"{source}: its aliases (*name) come to more than {_MOST_VALUES} values; write fewer")
        _note_lines(node, "", lines, source)  # before merges are resolved, which changes the nodes
        value = loader.construct_document(node)
        _require_text_keys(value, "", source)
        return node, value, lines
    except yaml.YAMLError:
        raise
    except RecursionError:
        raise ConfigError(f"{source}: lists and mappings are nested too deep; flatten them") from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # PyYAML on `!!int x` and the like
        raise ConfigError(f"{source}: a value is not what its tag (!!int, ...) or its digits say: {error}") from None


def _count_values(node: yaml.Node, known: dict[int, int], source: str) -> int:
    """Values that ``node`` comes to with its aliases followed. Each node is looked at once, however often it is named.

    Args:
        known: counts by the nodes' ids; 0 while a node is being counted.
    """
    count = known.get(id(node))
    if count == 0:
        raise ConfigError(f"{source}:{node.start_mark.line + 1}: a value holds itself, by an alias (*name); remove it")
    if count is None:
        known[id(node)] = 0
        inside: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            inside = node.value
        elif isinstance(node, yaml.MappingNode):
            inside = [part for pair in node.value for part in pair]
        count = known[id(node)] = 1 + sum(_count_values(child, known, source) for child in inside)
    return count


def read_yaml(path: Path) -> YamlDocument:
    """Read and parse a file; see :func:`parse_yaml`.

    Raises:
        ConfigError: also when the file is missing, is a folder, or is not UTF-8 text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such experiment file (looked from {Path.cwd()})") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; name the experiment's YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_yaml(text, source=str(path))


def _note_lines(node: yaml.Node, prefix: str, lines: dict[str, int], source: str) -> None:
    if isinstance(node, yaml.SequenceNode):
        for place, child in enumerate(node.value):
            lines.setdefault(f"{prefix}.{place}", child.start_mark.line + 1)
            _note_lines(child, f"{prefix}.{place}", lines, source)
    if not isinstance(node, yaml.MappingNode):
        return
    own: set[str] = set()
    for key, value in node.value:
        if key.tag == _MERGE_TAG:  # '<<: *anchor' may bring keys that are said again here: that is its purpose
            continue
        path = f"{prefix}.{key.value}" if prefix else str(key.value)
        line = key.start_mark.line + 1
        if path in own:
            raise ConfigError(f"{source}:{line}: {path} is said twice (first on line {lines[path]}); keep one")
        own.add(path)
        lines[path] = line
        _note_lines(value, path, lines, source)


def _require_text_keys(tree: Any, prefix: str, source: str) -> None:
    if isinstance(tree, list):
        for place, value in enumerate(tree):
            _require_text_keys(value, f"{prefix}.{place}", source)
    if not isinstance(tree, dict):
        return
    for key, value in tree.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if not isinstance(key, str):
            raise ConfigError(f"{source}: {path}: keys must be text, got {key!r}; quote it")
        _require_text_keys(value, path, source)


def _place(error: yaml.YAMLError, text: str) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        return f":{text.count(chr(10), 0, error.position) + 1}"
    mark = getattr(error, "problem_mark", None)
    return f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""


def _problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        return f"the character #x{error.character:04x} may not stand in YAML; remove it"
    problem = getattr(error, "problem", None) or str(error).replace("\n", " ")
    context = getattr(error, "context", None)
    return f"{problem} ({context})" if context else str(problem)
