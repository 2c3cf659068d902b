"""Policy objectives by name. Each is a function from :class:`PolicyTerms` to :class:`TokenLoss`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from areal_like.algo.m2po import m2po
from areal_like.algo.ppo import decoupled_ppo, ppo
from areal_like.algo.sequence import gspo, gspo_token, topr
from areal_like.algo.settings import ObjectiveSettings
from areal_like.algo.soft import cispo, sapo
from areal_like.algo.terms import PolicyTerms, TokenLoss

Objective = Callable[[PolicyTerms, ObjectiveSettings], TokenLoss]

OBJECTIVES: Mapping[str, Objective] = MappingProxyType(
    {
        "decoupled_ppo": decoupled_ppo,
        "ppo": ppo,
        "gspo": gspo,
        "gspo_token": gspo_token,
        "cispo": cispo,
        "sapo": sapo,
        "topr": topr,
        "m2po": m2po,
    }
)


def get_objective(name: str) -> Objective:
    """The objective registered as ``name``.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in OBJECTIVES:
        raise ValueError(f"objective {name!r} is unknown; choose one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]
