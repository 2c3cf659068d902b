"""Settings of the objectives, under the names that the ``actor`` section gives them. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

BehaveMode = Literal["truncate", "mask", "ignore"]
BehaveLevel = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """Numbers that the policy objectives read.

    Attributes:
        eps_clip: ε below.
        eps_clip_higher: ε above; None: the same as below.
        c_clip: dual clip for negative advantages; None: off.
        behave_cap: largest behaviour weight w; None: none.
        behave_mode: whether weights over the cap are truncated to it or their tokens dropped; ``ignore``: w is 1.
        behave_floor: smallest w; tokens below it are dropped (IcePop's lower side); None: none.
        behave_level: w of the token, of the whole sequence (product), or its geometric mean.
        tau_positive, tau_negative: SAPO's temperatures.
        m2_limit: M2PO's bound on the second moment of log w.
    """

    eps_clip: float = 0.2
    eps_clip_higher: float | None = None
    c_clip: float | None = None
    behave_cap: float | None = 5.0
    behave_mode: BehaveMode = "truncate"
    behave_floor: float | None = None
    behave_level: BehaveLevel = "token"
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    m2_limit: float = 0.04

    @property
    def eps_high(self) -> float:
        return self.eps_clip if self.eps_clip_higher is None else self.eps_clip_higher


def objective_settings(source: object) -> ObjectiveSettings:
    """Read every field from the attribute of the same name of ``source`` (an ``ActorConfig``)."""
    return ObjectiveSettings(**{f.name: getattr(source, f.name) for f in fields(ObjectiveSettings)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapingSettings:
    """What is done to a row's reward before advantages are taken (names as in ``actor.shaping``).

    Attributes:
        length_limit: written tokens that a row may have; the overlong and length options measure against it.
        overlong_margin: DAPO's soft punishment begins this many tokens before the limit; None: off.
        overlong_penalty: reward that a row at the limit loses by it.
        overlong_filter: rows at the limit teach nothing (they still count in denominators).
        length_reward: weight of Kimi's length reward; 0: off.
        bias, scaling: then reward becomes (reward + bias) · scaling.
        clip: then bounded to ±clip; None: not bounded.
    """

    length_limit: int | None = None
    overlong_margin: int | None = None
    overlong_penalty: float = 1.0
    overlong_filter: bool = False
    length_reward: float = 0.0
    bias: float = 0.0
    scaling: float = 1.0
    clip: float | None = None

    @property
    def changes_rewards(self) -> bool:
        return self.overlong_margin is not None or bool(self.length_reward) or self._linear != (0.0, 1.0, None)

    @property
    def _linear(self) -> tuple[float, float, float | None]:
        return self.bias, self.scaling, self.clip


def shaping_settings(source: object, max_new_tokens: int | None = None) -> ShapingSettings:
    """Read the fields of ``source`` (``actor.shaping``); its limit is ``max_new_tokens`` unless it sets another."""
    given = {f.name: getattr(source, f.name) for f in fields(ShapingSettings)}
    return ShapingSettings(**given | {"length_limit": given["length_limit"] or max_new_tokens})
