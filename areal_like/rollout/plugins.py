"""The user's classes and functions: found by dotted path, checked against their signatures before a run starts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, cast

from areal_like.api.dotted import import_object
from areal_like.api.generation import GenerationHyperparameters
from areal_like.api.workflow import RewardFunction, RolloutWorkflow, Tokenizer
from areal_like.errors import ConfigError

__all__ = ["build_workflow", "check_workflow", "import_callable", "import_object", "import_workflow"]

#: what an experiment offers to a workflow's ``__init__``
_OFFERED = ("reward_fn", "gconfig", "tokenizer")


def import_callable(path: str, kind: str) -> Any:
    """Import a function or another callable.

    Raises:
        ConfigError: it cannot be imported, or not be called.
    """
    found = import_object(path, kind)
    if not callable(found):
        raise ConfigError(f"{kind} {path!r} is {type(found).__name__}, which cannot be called")
    return found


def import_workflow(path: str) -> type[RolloutWorkflow]:
    """Import a workflow class.

    Raises:
        ConfigError: it cannot be imported, is no class, or lacks a coroutine method ``arun_episode``.
    """
    found = import_object(path, "workflow")
    if not inspect.isclass(found):
        raise ConfigError(f"workflow {path!r} is {type(found).__name__}; name a class with `async def arun_episode`")
    method = getattr(found, "arun_episode", None)
    if not inspect.iscoroutinefunction(method) or getattr(method, "__isabstractmethod__", False):
        raise ConfigError(f"workflow {path!r} needs `async def arun_episode(self, engine, data)`")
    left = sorted(getattr(found, "__abstractmethods__", ()))
    if left:
        raise ConfigError(f"workflow {path!r} is abstract: it does not implement {', '.join(left)}")
    return cast(type[RolloutWorkflow], found)


def check_workflow(path: str, *, has_reward: bool, workflow_args: Mapping[str, Any]) -> None:
    """Everything :func:`build_workflow` can refuse without constructing the workflow.

    Raises:
        ConfigError: see :func:`import_workflow`; or ``workflow_args`` do not fit its ``__init__``.
    """
    _arguments(path, import_workflow(path), dict.fromkeys(_offered(has_reward)), workflow_args)


def build_workflow(
    path: str,
    *,
    reward_fn: RewardFunction | None,
    gconfig: GenerationHyperparameters,
    tokenizer: Tokenizer,
    workflow_args: Mapping[str, Any],
) -> RolloutWorkflow:
    """Construct the workflow with those of ``reward_fn``, ``gconfig`` and ``tokenizer`` that its ``__init__`` names.

    Raises:
        ConfigError: see :func:`check_workflow`; or ``__init__`` raised.
    """
    workflow = import_workflow(path)
    objects = {"reward_fn": reward_fn, "gconfig": gconfig, "tokenizer": tokenizer}
    offered = {name: objects[name] for name in _offered(reward_fn is not None)}
    arguments = _arguments(path, workflow, offered, workflow_args)
    try:
        return workflow(**arguments)
    except ConfigError:
        raise
    except Exception as error:  # user code: whatever it raises is a fault of the experiment, found before the run
        raise ConfigError(f"workflow {path!r}: its __init__ raised {type(error).__name__}: {error}") from error


def _offered(has_reward: bool) -> tuple[str, ...]:
    return _OFFERED if has_reward else tuple(name for name in _OFFERED if name != "reward_fn")


def _arguments(
    path: str, workflow: type[RolloutWorkflow], offered: Mapping[str, Any], workflow_args: Mapping[str, Any]
) -> dict[str, Any]:
    """Keyword arguments for ``workflow``'s ``__init__``."""
    parameters = inspect.signature(workflow).parameters
    named = {k for k, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in workflow_args:
        if name in _OFFERED:
            raise ConfigError(
                f"workflow_args.{name}: the experiment gives {name} by itself; set {name} at the top level"
            )
        if name not in named and not takes_any:
            near = get_close_matches(name, named, n=1)
            hint = (
                f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(sorted(named - {*_OFFERED})) or 'none'}"
            )
            raise ConfigError(f"workflow_args.{name}: {path} takes no such argument; {hint}")
    arguments = {k: v for k, v in offered.items() if k in named} | dict(workflow_args)
    for name, parameter in parameters.items():
        if name in named and parameter.default is parameter.empty and name not in arguments:
            where = "reward_fn at the top level" if name == "reward_fn" else f"workflow_args.{name}"
            raise ConfigError(f"workflow {path} needs {name!r}; set {where} in the experiment file")
    return arguments
