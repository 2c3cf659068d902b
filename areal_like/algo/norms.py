"""How rewards become advantages: the settings, and the named methods of the literature. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal

Level = Literal["group", "batch"]
#: methods that compare rewards; ``gae`` compares them with a critic's values instead
AdvantageName = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "lite_ppo",
    "reinforce_baseline",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSettings:
    """What is subtracted from a reward, and what it is divided by (names as in ``actor.adv_norm``).

    Attributes:
        mean_level: baseline over the group or over the batch; None: 0.
        std_level: standard deviation (n − 1) over the group or over the batch; None: 1.
        mean_leave1out: the baseline leaves the episode's own reward out.
        std_of: take the deviation of the rewards, or of what is left after subtracting the baseline.
    """

    mean_level: Level | None = "group"
    std_level: Level | None = "group"
    mean_leave1out: bool = False
    std_of: Literal["rewards", "centred"] = "rewards"


def norm_settings(source: object) -> NormSettings:
    """Read every field from the attribute of the same name of ``source`` (``actor.adv_norm``)."""
    return NormSettings(**{f.name: getattr(source, f.name) for f in fields(NormSettings)})


#: named methods: how each turns rewards into advantages
ADVANTAGES: Mapping[AdvantageName, NormSettings] = MappingProxyType(
    {
        # (r − mean_group) / std_group: Shao et al. 2024 (DeepSeekMath), section 4.1.2
        "grpo": NormSettings(),
        # r − mean_group: Liu et al. 2025 (Understanding R1-Zero-like training), section 3.2
        "dr_grpo": NormSettings(std_level=None),
        # r − mean of the siblings: Ahmadian et al. 2024 (Back to basics), eq. 9
        "rloo": NormSettings(std_level=None, mean_leave1out=True),
        # (r − mean_batch) / std_batch: Hu et al. 2025 (REINFORCE++), eq. 4
        "reinforce_plus_plus": NormSettings(mean_level="batch", std_level="batch"),
        # r − mean_group, then divided by the deviation of that over the batch: Hu et al. 2025, REINFORCE++-baseline
        "reinforce_plus_plus_baseline": NormSettings(std_level="batch", std_of="centred"),
        # (r − mean_group) / std_batch: Liu et al. 2025 (Tricks or traps), Lite PPO
        "lite_ppo": NormSettings(std_level="batch"),
        # r − mean_batch: Williams 1992 with the batch's mean as reinforcement baseline
        "reinforce_baseline": NormSettings(mean_level="batch", std_level=None),
    }
)
