"""Arrows point down: who may import whom, and what must stay free of torch."""

from __future__ import annotations

import graphlib
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.architecture.conftest import Source

#: from top to bottom: a package imports itself and those below it
LAYERS = (
    "areal_like.control",
    "areal_like.rollout",
    "areal_like.train",
    "areal_like.inference",
    "areal_like.client",
    "areal_like.weights",
    "areal_like.rpc",
    "areal_like.config",
    "areal_like.api",
    "areal_like.algo",
    "areal_like.observe",
    "areal_like.errors",
)
#: below each other by order, and still strangers: they meet in api, weights and the launcher
STRANGERS = {
    ("areal_like.train", "areal_like.inference"),
    ("areal_like.train", "areal_like.client"),
    ("areal_like.inference", "areal_like.client"),
    ("areal_like.rollout", "areal_like.train"),
    ("areal_like.rollout", "areal_like.inference"),
    ("areal_like.control", "areal_like.inference"),
}
#: adapters of engines are the client's side of an engine: they speak to servers, and import neither torch nor a server
ADAPTERS = "areal_like.inference.backends"
#: what runs inside an engine's own processes, in its own environment
INSIDE_ENGINES = ("areal_like.inference.vllm_plugin", "areal_like.inference.sglang_plugin")
TORCH_FREE = ("api", "config", "rollout", "control", "client", "observe", "rpc")
#: modules that may unpickle: what comes through a pipe to a child process of our own, never over the network
PIPES = {"areal_like.rollout.reward_pool", "areal_like.rollout.reward_worker"}
#: launcher modules that are, or may start, something that computes
HEAVY_LAUNCHER = {"launcher.tiny_models"}


def listed(wrong: list[str]) -> str:
    return "\n" + "\n".join(sorted(wrong))


def owner(module: str) -> str:
    """``areal_like.rollout.buffer.Buffer`` -> ``areal_like.rollout``; foreign modules keep their first part."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "areal_like" and len(parts) > 1 else parts[0]


def test_every_package_has_its_place(sources: list[Source]) -> None:
    packages = {source.package for source in sources if source.module.startswith("areal_like.")}
    assert packages <= set(LAYERS)


def test_packages_import_only_what_lies_below_them(sources: list[Source]) -> None:
    rank = {package: place for place, package in enumerate(LAYERS)}
    wrong = [
        f"{source.where}:{entry.line} imports {entry.module}"
        for source in sources
        if source.package in rank
        for entry in source.imports
        if owner(entry.module) in rank and rank[owner(entry.module)] < rank[source.package]
    ]
    assert not wrong, listed(wrong)


def test_strangers_never_meet(sources: list[Source]) -> None:
    wrong = [
        f"{source.where}:{entry.line} imports {entry.module}"
        for source in sources
        for entry in source.imports
        if (source.package, owner(entry.module)) in STRANGERS
        and not (source.module.startswith(ADAPTERS) and owner(entry.module) == "areal_like.client")
    ]
    assert not wrong, listed(wrong)


def test_the_library_imports_neither_workflows_nor_the_launcher(sources: list[Source]) -> None:
    wrong = [
        f"{source.where}:{entry.line} imports {entry.module}"
        for source in sources
        if source.module.startswith("areal_like")
        for entry in source.imports
        if owner(entry.module) in ("workflows", "launcher", "benchmarks", "tests")
    ]
    assert not wrong, listed(wrong)


def test_workflows_import_of_the_library_only_its_api(sources: list[Source]) -> None:
    wrong = [
        f"{source.where}:{entry.line} imports {entry.module}"
        for source in sources
        if source.package == "workflows"
        for entry in source.imports
        if owner(entry.module).startswith(("areal_like", "launcher")) and owner(entry.module) != "areal_like.api"
    ]
    assert not wrong, listed(wrong)


def test_torch_free_packages_name_no_torch_anywhere(sources: list[Source]) -> None:
    wrong = [
        f"{source.where}:{entry.line} imports {entry.module}"
        for source in sources
        if source.package in {f"areal_like.{name}" for name in TORCH_FREE} or source.module.startswith(ADAPTERS)
        for entry in source.imports
        if owner(entry.module) == "torch" or (entry.at_load and owner(entry.module) in ("transformers", "safetensors"))
    ]
    assert not wrong, listed(wrong)


def test_no_engine_is_imported(sources: list[Source]) -> None:
    """vLLM and SGLang live in environments of their own."""
    outside = [source for source in sources if not source.module.startswith(INSIDE_ENGINES)]
    wrong = [s.where for s in outside for entry in s.imports if owner(entry.module) in ("vllm", "sglang")]
    assert not wrong, listed(wrong)


def test_nothing_can_unpickle(sources: list[Source]) -> None:
    wrong = [
        f"{source.where}:{entry.line} imports {entry.module}"
        for source in sources
        if source.module not in PIPES
        for entry in source.imports
        if owner(entry.module) in ("pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib")
    ]
    wrong += [f"{source.where}: recv_pyobj" for source in sources if "recv_pyobj" in source.text]
    assert not wrong, listed(wrong)


def test_loading_any_torch_free_module_loads_no_torch(sources: list[Source]) -> None:
    packages = {f"areal_like.{name}" for name in TORCH_FREE} | {"areal_like", "areal_like.errors", "launcher"}
    modules = [
        source.module
        for source in sources
        if source.package in packages and source.module not in HEAVY_LAUNCHER and not source.module.endswith("__main__")
    ]
    assert len(modules) > 40
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    for heavy in ('torch', 'transformers', 'safetensors'):\n"
        "        if heavy in sys.modules: sys.exit(f'{name} loads {heavy}')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("at_load", [True, False], ids=["modules", "packages"])
def test_there_is_no_cycle(sources: list[Source], at_load: bool) -> None:
    """Between modules as they load; between packages counting imports inside functions too."""
    known = {source.module for source in sources}
    graph: dict[str, set[str]] = {}
    for source in sources:
        targets = {_existing(entry.module, known) for entry in source.imports if entry.at_load or not at_load}
        if at_load:
            graph[source.module] = {t for t in targets if t and t != source.module}
        else:
            graph.setdefault(source.package, set()).update(owner(t) for t in targets if t)
    for node, targets in graph.items():
        targets.discard(node)
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle


def _existing(module: str, known: set[str]) -> str:
    """The module of ours that an import names: ``from a.b import c`` loads ``a.b.c`` if that is one, else ``a.b``."""
    while module and module not in known:
        module = module.rpartition(".")[0]
    return module
