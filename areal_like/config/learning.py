"""Rules between the sections that decide what is learned: actor, critic, ref, sampling."""

from __future__ import annotations

from areal_like.api.generation import GenerationHyperparameters
from areal_like.config.actor import ActorConfig
from areal_like.config.critic import CriticConfig


def check_learning(actor: ActorConfig, critic: CriticConfig | None, gconfig: GenerationHyperparameters) -> None:
    """Raises ValueError with the keys that do not go together."""
    if actor.advantage == "gae" and critic is None:
        raise ValueError("actor.advantage: gae needs a value model; add a section critic: {}")
    if critic is not None and actor.advantage != "gae":
        raise ValueError(
            f"critic: has no effect with actor.advantage: {actor.advantage or 'null'}; remove it, or set "
            "actor.advantage: gae"
        )
    limit = actor.shaping.length_limit or gconfig.max_new_tokens
    margin = actor.shaping.overlong_margin
    if margin is not None and margin > limit:
        key = "gconfig.max_new_tokens" if actor.shaping.length_limit is None else "actor.shaping.length_limit"
        raise ValueError(
            f"actor.shaping.overlong_margin ({margin}) exceeds {key} ({limit}), below which it lies; lower it"
            + ("" if actor.shaping.length_limit else ", or set actor.shaping.length_limit where answers add up")
        )
