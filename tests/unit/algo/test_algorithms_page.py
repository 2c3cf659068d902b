"""What docs/algorithms.md promises is what the experiment file accepts and the trainer reports."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from areal_like.algo.norms import ADVANTAGES, NormSettings
from areal_like.algo.objectives import OBJECTIVES, get_objective
from areal_like.algo.offpolicy import empty, finalise
from areal_like.algo.settings import ObjectiveSettings, ShapingSettings, objective_settings, shaping_settings
from areal_like.config.actor import ActorConfig
from areal_like.config.critic import CriticConfig
from areal_like.config.experiment import ExperimentConfig
from areal_like.config.load import config_from_mapping
from areal_like.config.reference import ReferenceConfig
from areal_like.config.yaml_text import parse_yaml

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)


def experiment(block: str) -> ExperimentConfig:
    """The block's sections in an experiment that has nothing else to say."""
    tree = parse_yaml(block, source="docs/algorithms.md").tree
    rest: dict[str, Any] = {
        "experiment_name": "page",
        "trial_name": "test",
        "total_train_steps": 1,
        "model": {"path": "m"},
        "train_dataset": {"path": "d.jsonl", "batch_size": 8},
        "workflow": "a.B",
        "gconfig": {"n_samples": 8},
    }
    return config_from_mapping({**rest, **tree}, source="docs/algorithms.md")


@pytest.mark.parametrize("block", BLOCKS)
def test_every_example_is_a_valid_experiment(block: str) -> None:
    actor = experiment(block).actor
    assert get_objective(actor.objective)
    assert objective_settings(actor) and shaping_settings(actor.shaping, 8)


def test_every_objective_and_named_method_is_on_the_page() -> None:
    assert all(f"| `{name}`" in PAGE for name in (*OBJECTIVES, *ADVANTAGES, "gae"))
    examples = [experiment(block).actor for block in BLOCKS]
    assert {e.objective for e in examples} == set(OBJECTIVES)
    assert {e.advantage for e in examples} == {*ADVANTAGES, "gae", None}
    for key in ("prox", "aggregation"):
        assert all(f"`{choice}`" in PAGE for choice in get_args(ActorConfig.model_fields[key].annotation))


def test_the_first_example_is_the_default() -> None:
    assert experiment(BLOCKS[0]).actor == ActorConfig()


def test_every_key_that_decides_what_is_learned_is_on_the_page() -> None:
    settings = {field.name for kind in (ObjectiveSettings, ShapingSettings, NormSettings) for field in fields(kind)}
    sections = {key for section in (CriticConfig, ReferenceConfig) for key in section.model_fields} - {"optimizer"}
    more = {"advantage", "adv_norm", "aggregation_constant", "discount", "entropy_coef", "gae_lambda", "objective"}
    assert [key for key in sorted(settings | sections | more) if key not in PAGE] == []


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
