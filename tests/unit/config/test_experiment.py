"""Rules that cross sections of the experiment file."""

from __future__ import annotations

from typing import Any

import pytest

from areal_like.config.load import config_from_mapping
from areal_like.errors import ConfigError


def _tree(**sections: Any) -> dict[str, Any]:
    return {
        "experiment_name": "e",
        "trial_name": "t",
        "total_train_steps": 1,
        "model": {"path": "m"},
        "train_dataset": {"path": "d.jsonl", "batch_size": 4},
        "workflow": "a.B",
        "gconfig": {"n_samples": 2},
        **sections,
    }


def test_a_sound_experiment_is_accepted() -> None:
    assert config_from_mapping(_tree()).train_dataset.batch_size == 4


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"actor": {"ppo_n_minibatches": 3}}, "batch_size (4) must be a multiple of actor.ppo_n_minibatches (3)"),
        ({"gconfig": {"n_samples": 2, "top_p": 0.9}}, "gconfig.top_p"),
        ({"gconfig": {"n_samples": 2, "temperature": 0.0}}, "gconfig.temperature"),
        ({"gconfig": {"n_samples": 2, "greedy": True}}, "gconfig.greedy"),
        ({"gconfig": {"n_samples": 1}, "rollout": {"drop_equal_rewards": True}}, "n_samples of at least 2"),
        ({"actor": {"advantage": "gae"}}, "needs a value model; add a section critic"),
        ({"critic": {}}, "critic: has no effect with actor.advantage: null"),
        ({"critic": {}, "actor": {"advantage": "rloo"}}, "has no effect with actor.advantage: rloo"),
        ({"ref": {"kl_in": "reward"}}, "kl_estimator: k3 does not have the KL's gradient"),
        (
            {"actor": {"shaping": {"overlong_margin": 9}}, "gconfig": {"n_samples": 2, "max_new_tokens": 8}},
            "actor.shaping.overlong_margin (9) exceeds gconfig.max_new_tokens (8)",
        ),
        (
            {"actor": {"shaping": {"overlong_margin": 9, "length_limit": 7}}},
            "actor.shaping.overlong_margin (9) exceeds actor.shaping.length_limit (7)",
        ),
        ({"rollout": {"max_head_offpolicyness": -1}}, "rollout.max_head_offpolicyness"),
        ({"recover": {"mode": "auto"}}, "recover.mode"),
    ],
)
def test_what_cannot_work_is_refused_with_its_key(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_from_mapping(_tree(**sections))
    assert said in str(refused.value)


def test_a_named_advantage_is_read_back_from_the_resolved_file() -> None:
    config = config_from_mapping(_tree(actor={"advantage": "rloo"}))
    again = config_from_mapping(config.model_dump(mode="json"))
    assert again == config
    assert again.actor.normalisation.mean_leave1out


def test_evaluation_may_sample_as_it_likes() -> None:
    config = config_from_mapping(_tree(eval_gconfig={"top_p": 0.9}))
    assert config.evaluation_gconfig.top_p == 0.9


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 2**63}, "seed: must be at most 9223372036854775807; got 9223372036854775808"),
        ({"trial_name": "x" * 201}, "trial_name: must have at most 200 characters"),
        ({"experiment_name": "x" * 201}, "experiment_name: must have at most 200 characters"),
        ({"runs_dir": "a\0b"}, "runs_dir: must match"),
    ],
)
def test_what_no_run_could_bear_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_mapping(_tree(**changes))
    assert said in str(caught.value)
