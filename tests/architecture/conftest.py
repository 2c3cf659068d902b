"""The source tree as the architecture tests see it: every module, parsed once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: what is installed and imported; benchmarks are scripts, and keep the budgets only
PACKAGES = ("areal_like", "workflows", "launcher")


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One import statement: the module it names, and whether it runs when the importing module is loaded."""

    module: str
    line: int
    at_load: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One module: ``package`` is ``areal_like.rollout`` for everything below it, and ``launcher`` for the launcher."""

    path: Path
    module: str
    text: str = field(repr=False)
    tree: ast.Module = field(repr=False)

    @property
    def package(self) -> str:
        parts = self.module.split(".")
        return ".".join(parts[:2]) if parts[0] == "areal_like" else parts[0]

    @property
    def where(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def imports(self) -> tuple[Import, ...]:
        return tuple(_imports(self.tree.body, at_load=True, base=self._base))

    @property
    def _base(self) -> str:
        return self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]


def _imports(body: list[ast.stmt], *, at_load: bool, base: str) -> Iterator[Import]:
    for statement in body:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield Import(module=alias.name, line=statement.lineno, at_load=at_load)
        elif isinstance(statement, ast.ImportFrom):
            parts = base.split(".")
            prefix = ".".join(parts[: len(parts) - statement.level + 1]) if statement.level else ""
            module = ".".join(part for part in (prefix, statement.module or "") if part)
            for alias in statement.names:  # `from a import b`: b may be a module
                yield Import(module=f"{module}.{alias.name}", line=statement.lineno, at_load=at_load)
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            yield from _imports(statement.orelse, at_load=at_load, base=base)
        else:
            inside = at_load and not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef))
            for _, value in ast.iter_fields(statement):
                if isinstance(value, list):
                    nested = [v for v in value if isinstance(v, ast.stmt)]
                    nested += [s for v in value if isinstance(v, (ast.ExceptHandler, ast.match_case)) for s in v.body]
                    yield from _imports(nested, at_load=inside, base=base)


def _read(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return Source(path=path, module=name, text=text, tree=ast.parse(text))


@pytest.fixture(scope="session")
def sources() -> list[Source]:
    """Every module of the installed packages."""
    return [_read(path) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.fixture(scope="session")
def scripts() -> list[Source]:
    """The benchmarks."""
    return [_read(path) for path in sorted((ROOT / "benchmarks").glob("*.py"))]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT
