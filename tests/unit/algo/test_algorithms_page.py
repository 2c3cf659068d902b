"""What docs/algorithms.md promises is what the experiment file accepts and the trainer reports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from areal_like.algo.norms import ADVANTAGES, norm_settings
from areal_like.algo.objectives import OBJECTIVES
from areal_like.algo.offpolicy import empty, finalise
from areal_like.config.actor import ActorConfig
from areal_like.config.yaml_text import parse_yaml

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
def test_every_example_is_a_valid_actor_section(block: str) -> None:
    tree = parse_yaml(block, source="docs/algorithms.md").tree
    assert set(tree) == {"actor"}
    ActorConfig.model_validate(tree["actor"])


def test_every_objective_and_named_method_is_on_the_page() -> None:
    assert all(f"| `{name}`" in PAGE for name in OBJECTIVES)
    examples = [ActorConfig.model_validate(parse_yaml(b, source="page").tree["actor"]) for b in BLOCKS]
    assert {e.objective for e in examples} | {"gspo_token"} == set(OBJECTIVES)  # needs no example beside gspo's
    shown = [norm_settings(e.adv_norm) for e in examples]
    assert all(norm in shown for norm in ADVANTAGES.values())
    for key in ("prox", "aggregation"):
        assert all(f"`{choice}`" in PAGE for choice in get_args(ActorConfig.model_fields[key].annotation))


def test_the_first_example_is_the_default() -> None:
    assert ActorConfig.model_validate(parse_yaml(BLOCKS[0], source="page").tree["actor"]) == ActorConfig()


def test_every_figure_of_the_page_is_reported() -> None:
    reported = set(finalise(empty()))
    named = {
        name for row in re.findall(r"^\| `offpolicy/.*?\|", PAGE, flags=re.M) for name in re.findall(r"`(.*?)`", row)
    }
    for name in named:
        name = name.removeprefix("offpolicy/")
        assert name in reported or name in ("lag_tokens_<n>", "version_tokens_<v>", "_rms", "_max"), name
    missing = {n for n in reported if f"{n}`" not in PAGE} - {"tokens", "logprob_gap_rms", "logprob_gap_max"}
    assert not missing
