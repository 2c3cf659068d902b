"""``actor``: how the trainer is spread and what it saves memory with."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from areal_like.config.actor import ActorConfig
from areal_like.config.experiment import ExperimentConfig


@pytest.mark.parametrize("backend", ["fsdp:d2c2t2", "fsdp:d1t2", "fsdp:d2p2", "fsdp:d2e2"])
def test_other_parallelism_is_parsed_and_refused(backend: str) -> None:
    with pytest.raises(ValidationError, match=r"only data parallelism \(d\) is supported; use fsdp:d"):
        ActorConfig(backend=backend)


@pytest.mark.parametrize(("backend", "message"), [("fsdp:d2x2", "x2"), ("fsdp:2d", "do not parse"), ("ddp:d1", "ddp")])
def test_what_does_not_parse_is_refused(backend: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ActorConfig(backend=backend)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_copies_of_the_model_are_whole(size: int) -> None:
    assert ActorConfig(backend="fsdp:d4", shard_size=size).shard_size == size


def test_other_copies_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"shard_size \(3\) must divide .*\(4\): choose one of 1, 2, 4"):
        ActorConfig(backend="fsdp:d4", shard_size=3)


def test_adapters_need_servers_that_add_them() -> None:
    tree: dict[str, Any] = {
        "experiment_name": "e",
        "trial_name": "t",
        "total_train_steps": 1,
        "model": {"path": "m"},
        "train_dataset": {"path": "d", "batch_size": 1},
        "workflow": "w.W",
        "actor": {"lora": {"rank": 4}},
    }
    assert ExperimentConfig.model_validate(tree).actor.lora is not None
    with pytest.raises(ValidationError, match=r"actor\.lora publishes adapters alone.*vllm:d1"):
        ExperimentConfig.model_validate(tree | {"rollout": {"backend": "vllm:d1"}})
    with pytest.raises(ValidationError, match="rank"):
        ActorConfig.model_validate({"lora": {"rank": 0}})


OBJECTIVES = get_args(ActorConfig.model_fields["objective"].annotation)


@pytest.mark.parametrize(
    ("key", "value", "readers"),
    [
        ("c_clip", 3.0, {"decoupled_ppo", "ppo", "gspo", "gspo_token"}),
        ("tau_positive", 2.0, {"sapo"}),
        ("tau_negative", 2.0, {"sapo"}),
        ("m2_limit", 0.1, {"m2po"}),
    ],
)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_key_that_the_objective_does_not_read_is_refused(
    key: str, value: float, readers: set[str], objective: str
) -> None:
    if objective in readers:
        assert getattr(ActorConfig.model_validate({"objective": objective, key: value}), key) == value
    else:
        with pytest.raises(ValidationError, match=rf"{key} \({value:g}\) has no effect with objective {objective}"):
            ActorConfig.model_validate({"objective": objective, key: value})


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_takes_the_defaults(objective: str) -> None:
    assert ActorConfig.model_validate({"objective": objective}).objective == objective


def test_a_mask_needs_what_it_drops_above() -> None:
    with pytest.raises(ValidationError, match="behave_mode: mask has no effect without behave_cap"):
        ActorConfig.model_validate({"behave_mode": "mask", "behave_cap": None, "behave_floor": 0.5})
    assert ActorConfig.model_validate({"behave_mode": "mask", "behave_floor": 0.5}).behave_cap == 5.0


def test_no_weight_has_no_floor() -> None:
    with pytest.raises(ValidationError, match=r"behave_floor \(0.5\) has no effect with behave_mode: ignore"):
        ActorConfig.model_validate({"behave_mode": "ignore", "behave_floor": 0.5})
