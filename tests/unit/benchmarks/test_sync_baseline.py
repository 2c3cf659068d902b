"""The synchronous baseline learns from its own episodes, and repeats the train engine's updates to the bit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from areal_like.api.batch_file import write_batch
from areal_like.api.trajectory import Batch, GroupTag, PromptId, Trajectory, TrajectoryTag
from areal_like.config.experiment import ExperimentConfig
from areal_like.config.load import config_from_mapping, dump_resolved
from areal_like.train.engine import TrainEngine
from areal_like.train.model import PolicyModel, load_language_model, replayed_sampling
from areal_like.train.parallel import Parallel, process_group
from areal_like.train.ppo import PpoUpdate

VOCABULARY, EOS = 17, 2


@pytest.fixture(scope="module")
def baseline() -> Iterator[ModuleType]:
    folder = str(Path(__file__).parents[3] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        import sync_baseline

        yield sync_baseline
    finally:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("baseline") / "model"
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.5,
        eos_token_id=EOS,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parallel]:
    rendezvous = f"file://{tmp_path_factory.mktemp('rendezvous') / 'file'}"
    with process_group(rank=0, world_size=1, rendezvous=rendezvous, device=torch.device("cpu"), timeout=60) as parallel:
        yield parallel


def experiment(model_dir: Path, **sections: Any) -> ExperimentConfig:
    tree: dict[str, Any] = {
        "experiment_name": "baseline",
        "trial_name": "test",
        "total_train_steps": 3,
        "model": {"path": str(model_dir)},
        "train_dataset": {"path": "unused.jsonl", "batch_size": 4},
        "workflow": "workflows.guess.GuessWorkflow",
        "gconfig": {"n_samples": 3, "max_new_tokens": 6, "min_new_tokens": 2, "temperature": 0.8},
        "actor": {
            "ppo_n_minibatches": 2,
            "optimizer": {"lr": 3e-3, "gradient_clipping": 0.1, "lr_scheduler_type": "linear", "warmup_steps": 2},
        },
    }
    for name, changes in sections.items():
        tree[name] = tree.get(name, {}) | changes
    return config_from_mapping(tree)


def rows_of(version: int, *, turn_rewards: bool = False) -> list[Trajectory]:
    """Four groups of one to three rows: two answers with environment text between, stale tokens, trailing text."""
    rng = np.random.default_rng(version)
    rows = []
    for group in range(4):
        for sibling in range(1 + group % 3):
            answers = [int(rng.integers(1, 5)), int(rng.integers(1, 5))]
            mask = np.array([0, 0, *[1] * answers[0], 0, *[1] * answers[1], 0], np.int32)
            written = mask == 1
            versions = np.where(written, rng.integers(max(0, version - 2), version + 1, mask.size), -1)
            rows.append(
                Trajectory(
                    token_ids=rng.integers(3, VOCABULARY, mask.size).astype(np.int32),
                    loss_mask=mask,
                    logprobs=np.where(written, rng.normal(-2.5, 0.4, mask.size), 0.0).astype(np.float32),
                    versions=versions.astype(np.int32),
                    reward=float(rng.integers(0, 3)),
                    returns=rng.normal(0, 1, mask.size).astype(np.float32) if turn_rewards else None,
                    group_id=f"v{version}g{group}",
                    episode_id=f"v{version}g{group}s{sibling}",
                )
            )
    return rows


def batch_of(rows: list[Trajectory], version: int) -> Batch:
    tags: dict[str, list[TrajectoryTag]] = {}
    for row in rows:
        written = row.versions[row.loss_mask == 1]
        tag = TrajectoryTag(
            key=row.episode_id,
            group_id=row.group_id,
            episode_id=row.episode_id,
            length=row.length,
            loss_tokens=written.size,
            reward=row.reward,
            oldest_version=int(written.min()),
            newest_version=int(written.max()),
        )
        tags.setdefault(row.group_id, []).append(tag)
    groups = (
        GroupTag(group_id=g, prompt=PromptId(epoch=0, index=i), attempt=0, stamp=0, trajectories=tuple(members))
        for i, (g, members) in enumerate(tags.items())
    )
    return Batch(version=version, groups=tuple(groups))


def engine_weights(config: ExperimentConfig, batches: list[list[Trajectory]], parallel: Parallel) -> dict[str, Any]:
    """Weights after the train engine's updates."""
    model = load_language_model(config.model.path, dtype=torch.float32, layout="padded")
    policy = PolicyModel(model, replayed_sampling(config.gconfig, model))
    steps = config.total_train_steps * config.actor.ppo_n_minibatches
    engine = TrainEngine(policy, parallel, config.actor.optimizer, total_steps=steps)
    for version, rows in enumerate(batches):
        by_key = {row.episode_id: row for row in rows}
        PpoUpdate(engine, config.actor, lambda keys, by_key=by_key: [by_key[k] for k in keys]).run(
            batch_of(rows, version)
        )
    return {name: tensor.detach().clone() for name, tensor in engine.named_weights()}


CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "interpolated": {"actor": {"prox": "interpolate", "c_clip": 3.0}},
    "dr_grpo": {
        "actor": {
            "adv_norm": {"std_level": None},
            "aggregation": "seq_mean_token_sum",
            "aggregation_constant": 6.0,
        }
    },
    "gspo": {"actor": {"objective": "gspo", "aggregation": "seq_mean_token_mean", "prox": "behave"}},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("turn_rewards", [False, True], ids=["outcome", "turns"])
def test_updates_equal_the_train_engines(
    baseline: ModuleType, model_dir: Path, one_rank: Parallel, case: str, turn_rewards: bool
) -> None:
    base = experiment(model_dir)
    changes = {name: base.model_dump(mode="json")[name] | section for name, section in CASES[case].items()}
    config = experiment(model_dir, **changes)
    batches = [rows_of(version, turn_rewards=turn_rewards) for version in range(3)]
    policy = baseline.Policy(config)
    for rows in batches:
        policy.update(rows)
    theirs = engine_weights(config, batches, one_rank)
    before = dict(baseline.Policy(config).model.named_parameters())
    for name, ours in policy.model.named_parameters():
        assert float((ours.detach() - theirs[name]).abs().max()) <= baseline.PARAMETER_TOLERANCE, name
        assert not torch.equal(ours, before[name]), name


def test_a_recorded_run_is_replayed(
    baseline: ModuleType, model_dir: Path, one_rank: Parallel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = experiment(model_dir)
    (tmp_path / "config.yaml").write_text(dump_resolved(config))
    batches = [rows_of(version) for version in range(3)]
    for version, rows in enumerate(batches):
        write_batch(tmp_path, version, rows)
    final = baseline.Policy(config)
    final.model.load_state_dict(engine_weights(config, batches, one_rank), strict=False)
    final.model.save_pretrained(tmp_path / "checkpoints" / "version-000003")

    assert baseline.replay(tmp_path) <= baseline.PARAMETER_TOLERANCE
    assert "3 steps replayed" in capsys.readouterr().out

    with torch.no_grad():
        final.model.lm_head.weight[0, 0] += 1e-4
    final.model.save_pretrained(tmp_path / "checkpoints" / "version-000003")
    assert baseline.replay(tmp_path) == pytest.approx(1e-4, rel=0.01)

    (tmp_path / "batches" / "00000001.npz").unlink()
    with pytest.raises(SystemExit, match="version 2, but that of 1 is missing"):
        baseline.replay(tmp_path)


@pytest.mark.parametrize(
    "section", [{"ref": {}}, {"actor": {"entropy_coef": 0.1}}, {"actor": {"shaping": {"scaling": 2.0}}}]
)
def test_what_it_would_leave_out_is_refused(baseline: ModuleType, model_dir: Path, section: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match="does without"):
        baseline.Policy(experiment(model_dir, **section))


def test_generated_log_probs_are_those_that_training_recomputes(baseline: ModuleType, model_dir: Path) -> None:
    """Temperature and the stop-token ban are sampled from, reported and replayed alike."""
    from areal_like.api import ModelRequest
    from areal_like.api.transcript import Transcript

    config = experiment(model_dir)
    policy = baseline.Policy(config)
    prompts = [[1], [5, 6, 7], [9, 3]] * 8
    answers = policy.generate([ModelRequest(input_ids=p, gconfig=config.gconfig) for p in prompts])
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        assert 2 <= answer.output_len <= 6
        assert EOS not in answer.output_tokens[:2]
        assert answer.stop_reason == ("stop" if answer.output_tokens[-1] == EOS else "length")
        transcript = Transcript()
        transcript.add_context(prompt)
        transcript.add_answer(answer)
        rows.append(transcript.build(0.0))
    with torch.no_grad():
        again_T = policy.logprobs(rows)
    reported = np.concatenate([answer.output_logprobs for answer in answers])
    np.testing.assert_allclose(again_T.numpy(), reported, atol=2e-5)


def test_it_trains_on_the_experiments_own_workflow(
    baseline: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from launcher.tiny_models import GuessSettings, TinyLlama, build_guess

    size = TinyLlama(hidden=16, layers=1, heads=2)
    build_guess(tmp_path / "guess", 1, GuessSettings(size=size, warm_steps=1, warm_rows=4))
    config = experiment(
        tmp_path / "guess" / "model",
        train_dataset={"path": str(tmp_path / "guess" / "train.jsonl"), "batch_size": 4},
        workflow_args={"turns": 3},
        gconfig={"n_samples": 3, "max_new_tokens": 1, "min_new_tokens": 0},
    )
    policy = baseline.train(config)
    assert policy.version == 3
    assert policy.optimizer_steps == 6
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["step", str(i)] for i in (1, 2, 3)]
    assert all(0.0 <= float(line.split()[3]) <= 1.0 for line in lines)
