"""Settings of the objectives, under the names that the ``actor`` section gives them. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

BehaveMode = Literal["truncate", "mask"]
BehaveLevel = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """Numbers that the policy objectives read.

    Attributes:
        eps_clip: ε below.
        eps_clip_higher: ε above; None: the same as below.
        c_clip: dual clip for negative advantages; None: off.
        behave_cap: largest behaviour weight w; None: none.
        behave_mode: whether weights over the cap are truncated to it or their tokens dropped.
        behave_floor: smallest w; tokens below it are dropped (IcePop's lower side); None: none.
        behave_level: w of the token, of the whole sequence (product), or its geometric mean.
        tau_positive, tau_negative: SAPO's temperatures.
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

    @property
    def eps_high(self) -> float:
        return self.eps_clip if self.eps_clip_higher is None else self.eps_clip_higher


def objective_settings(source: object) -> ObjectiveSettings:
    """Read every field from the attribute of the same name of ``source`` (an ``ActorConfig``)."""
    return ObjectiveSettings(**{f.name: getattr(source, f.name) for f in fields(ObjectiveSettings)})
