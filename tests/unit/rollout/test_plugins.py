"""Workflows are built from their own signature; what does not fit is said before a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal_like.api.generation import GenerationHyperparameters
from areal_like.errors import ConfigError
from areal_like.rollout.plugins import build_workflow, check_workflow, import_callable

_CODE = """
from areal_like.api import RolloutWorkflow


class Full(RolloutWorkflow):
    def __init__(self, reward_fn, gconfig, tokenizer, turns, shout=False):
        self.got = (reward_fn, gconfig, tokenizer, turns, shout)

    async def arun_episode(self, engine, data):
        return None


class Small(RolloutWorkflow):
    def __init__(self, gconfig):
        self.got = gconfig

    async def arun_episode(self, engine, data):
        return None


class Duck:
    async def arun_episode(self, engine, data):
        return None


class Anything(Duck):
    def __init__(self, **options):
        self.got = options


class Broken(Duck):
    def __init__(self, gconfig):
        raise RuntimeError("no such dictionary")


class Plain(RolloutWorkflow):
    def arun_episode(self, engine, data):
        return None


class Empty(RolloutWorkflow):
    pass


number = 3
"""
GCONFIG = GenerationHyperparameters()


@pytest.fixture(autouse=True)
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugin_task.py").write_text(_CODE)
    monkeypatch.syspath_prepend(str(tmp_path))


def build(name: str, *, reward_fn: Any = "reward", **workflow_args: Any) -> Any:
    return build_workflow(
        f"plugin_task.{name}",
        reward_fn=reward_fn,
        gconfig=GCONFIG,
        tokenizer="tokenizer",  # type: ignore[arg-type]  # only handed on
        workflow_args=workflow_args,
    )


def test_a_workflow_gets_what_its_init_names() -> None:
    assert build("Full", turns=3, shout=True).got == ("reward", GCONFIG, "tokenizer", 3, True)
    assert build("Small").got is GCONFIG


def test_any_class_with_arun_episode_will_do() -> None:
    assert build("Duck")
    assert build("Anything", colour="red").got == {"colour": "red"}


@pytest.mark.parametrize(
    ("name", "workflow_args", "message"),
    [
        ("Full", {}, "needs 'turns'; set workflow_args.turns"),
        ("Full", {"turns": 1, "shuot": True}, "workflow_args.shuot: plugin_task.Full takes no such argument"),
        ("Full", {"turns": 1, "shuot": True}, "did you mean 'shout'?"),
        ("Small", {"zzz": 1}, "it takes none"),
        ("Small", {"gconfig": {}}, "workflow_args.gconfig: the experiment gives gconfig by itself"),
        ("Plain", {}, "needs `async def arun_episode(self, engine, data)`"),
        ("Empty", {}, "needs `async def arun_episode(self, engine, data)`"),
        ("number", {}, "is int; name a class"),
    ],
)
def test_what_does_not_fit_is_explained_without_building(
    name: str, workflow_args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        check_workflow(f"plugin_task.{name}", has_reward=True, workflow_args=workflow_args)
    assert message in str(raised.value)


def test_a_workflow_that_needs_a_reward_function_says_where_to_set_it() -> None:
    with pytest.raises(ConfigError, match="needs 'reward_fn'; set reward_fn at the top level"):
        check_workflow("plugin_task.Full", has_reward=False, workflow_args={"turns": 1})
    with pytest.raises(ConfigError, match="needs 'reward_fn'"):
        build("Full", reward_fn=None, turns=1)


def test_a_constructor_that_raises_is_a_fault_of_the_experiment() -> None:
    with pytest.raises(ConfigError, match="its __init__ raised RuntimeError: no such dictionary"):
        build("Broken")


def test_only_callables_can_be_called() -> None:
    with pytest.raises(ConfigError, match=r"accept_fn 'plugin_task.number' is int, which cannot be called"):
        import_callable("plugin_task.number", "accept_fn")
