"""Every key that a message names must exist."""

from __future__ import annotations

import pytest

from areal_like.config.experiment import ExperimentConfig
from areal_like.config.nearest import AREAL_KEYS, annotation_at, explain_unknown, key_paths, nearest_key

KNOWN = frozenset(key_paths(ExperimentConfig))


def test_every_key_of_ours_in_the_table_exists_and_none_of_theirs_does() -> None:
    assert {ours for ours, _ in AREAL_KEYS.values() if ours is not None} <= KNOWN
    assert not set(AREAL_KEYS) & KNOWN


def test_every_entry_says_something() -> None:
    assert all(ours is not None or why for ours, why in AREAL_KEYS.values())


@pytest.mark.parametrize("path", sorted(KNOWN))
def test_one_missing_letter_finds_the_key_again(path: str) -> None:
    parent, _, name = path.rpartition(".")
    typo = name[:1] + name[2:] if len(name) > 2 else f"{name}{name[-1]}"
    wrong = f"{parent}.{typo}" if parent else typo
    found = nearest_key(ExperimentConfig, wrong)
    assert found == path or wrong in KNOWN


def test_types_are_found_through_optional_sections() -> None:
    assert annotation_at(ExperimentConfig, "eval_gconfig.top_p") is float
    assert annotation_at(ExperimentConfig, "valid_dataset.path") is str
    assert annotation_at(ExperimentConfig, "seed.nothing") is None
    assert annotation_at(ExperimentConfig, "nothing") is None


def test_an_areal_key_is_explained_before_it_is_taken_for_a_typo() -> None:
    assert explain_unknown(ExperimentConfig, "rollout.queue_size").startswith(
        "unknown key; here it is rollout.max_conc"
    )


@pytest.mark.parametrize("path", [p for p in key_paths(ExperimentConfig) if p.count(".") >= 2])
def test_a_key_one_section_too_high_is_found(path: str) -> None:
    section, name = path.split(".")[0], path.rpartition(".")[2]
    if annotation_at(ExperimentConfig, f"{section}.{name}") is None:
        nearest = nearest_key(ExperimentConfig, f"{section}.{name}")
        assert nearest is not None and nearest.startswith(f"{section}.") and nearest.endswith(f".{name}")
