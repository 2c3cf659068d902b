"""One short run, asynchronous: what it promises to write, and what the other commands do with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import (
    LONG_ANSWERS,
    Workspace,
    evaluations_of,
    rollouts_of,
    spans_of,
    steps_of,
    summary_of,
)

from areal_like.config.load import load_config
from areal_like.config.paths import RunPaths

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

STEPS, BATCH, SAMPLES, ETA = 6, 4, 4, 2
#: row i of the training set has the secret i modulo this
NUMBERS = 5


@pytest.fixture(scope="module")
def short(workspace: Workspace) -> RunPaths:
    return workspace.run("short", "evaluator.freq_steps=3", "saver.freq_steps=4")


@pytest.fixture(scope="module")
def long_answers(workspace: Workspace) -> RunPaths:
    return workspace.run("long", *LONG_ANSWERS)


def test_the_resolved_experiment_reads_back(short: RunPaths) -> None:
    config = load_config(short.resolved_config)
    assert (config.trial_name, config.total_train_steps) == ("short", STEPS)
    assert config.evaluator.freq_steps == 3
    assert config.actor.eps_clip == 0.2  # a default, said outright


def test_metrics_hold_a_line_a_step_and_every_evaluation(short: RunPaths) -> None:
    steps = steps_of(short)
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert [line["version"] for line in steps] == list(range(1, STEPS + 1))
    for line in steps:
        assert line["batch"]["groups"] == BATCH
        assert line["batch"]["trajectories"] == BATCH * SAMPLES
        assert sum(line["batch"]["lag_histogram"].values()) == BATCH
        assert 0 <= line["lag_mean"] <= line["lag_max"] <= ETA
        assert line["train"]["train/optimizer_steps"] == 2
        assert line["train"]["train/skipped_minibatches"] == 0
        assert line["wait_seconds"] + line["update_seconds"] <= line["step_seconds"]
        parts = line["publication"]
        assert 0 < parts["export"] + parts["stage"] + parts["commit"] <= line["publish_seconds"] + 1e-3
        assert parts["commit.paused"] <= parts["commit"]
        assert "non_finite" not in line
    assert [line["seconds"] for line in steps] == sorted(line["seconds"] for line in steps)
    evaluations = evaluations_of(short)
    assert [e["version"] for e in evaluations] == [0, 3, 6, 6]
    assert all(e["episodes"] == 20 and e["failed"] == 0 for e in evaluations)
    assert evaluations[0]["versions"] == [0]
    assert evaluations[-1]["versions"] == [STEPS]


def test_the_summary_agrees_with_the_metrics_and_with_itself(short: RunPaths) -> None:
    summary, steps, evaluations = summary_of(short), steps_of(short), evaluations_of(short)
    assert summary["steps"] == STEPS
    assert summary["stopped_by"] is None
    assert summary["versions_published"] == STEPS + 1
    assert summary["groups"] == {"trained": STEPS * BATCH, "filtered": 0, "failed": 0, "stale": 0, "cancelled": 0}
    assert summary["lag_max"] == max(line["lag_max"] for line in steps) <= ETA
    assert summary["lag_mean"] == pytest.approx(sum(line["lag_mean"] for line in steps) / STEPS)
    assert summary["reward_first"] == pytest.approx(steps[0]["reward"])
    assert summary["reward_last"] == pytest.approx(steps[-1]["reward"])
    assert summary["eval_before"] == pytest.approx(evaluations[0]["reward"])
    assert summary["eval_after"] == pytest.approx(evaluations[-1]["reward"])
    assert summary["trained_tokens"] == sum(line["batch"]["loss_tokens"] for line in steps)
    assert summary["generated_tokens"] >= summary["trained_tokens"]
    assert summary["interrupted_requests"] >= sum(line["interrupted_requests"] for line in steps)
    weights = sum(f.stat().st_size for f in (short.checkpoint(STEPS)).glob("*.safetensors"))
    assert summary["weight_bytes_total"] == pytest.approx((STEPS + 1) * weights, rel=0.05)
    assert 0 < summary["pause_seconds_total"] < summary["seconds"]
    assert summary["multi_version_trajectories"] == sum(line["batch"]["multi_version_trajectories"] for line in steps)


def test_every_process_has_a_log(short: RunPaths) -> None:
    assert {p.name for p in short.logs.iterdir()} == {"controller.log", "inference-0.log", "train-0.log", "rewards.log"}
    for name in ("inference-0", "train-0"):
        text = (short.logs / f"{name}.log").read_text()
        assert text, name
        assert "Traceback" not in text


def test_rollouts_are_written_for_people_to_read(short: RunPaths) -> None:
    batches = rollouts_of(short)
    assert sorted(batches) == list(range(STEPS))
    for version, lines in batches.items():
        assert len(lines) == BATCH * SAMPLES
        assert len({line["group_id"] for line in lines}) == BATCH
        assert len({line["episode_id"] for line in lines}) == BATCH * SAMPLES
        for line in lines:
            assert line["prompt"] == "<bos>"
            assert line["reward"] in (0.0, 1.0)
            assert line["reward"] <= (str(line["index"] % NUMBERS) in line["text"].split())
            oldest = min(v for v, _, _ in line["token_versions"])
            assert line["lag"] == version - oldest <= ETA
            written = sum(end - start for _, start, end in line["token_versions"])
            assert written == line["loss_tokens"]


def test_rewards_are_those_of_the_text_that_was_written(long_answers: RunPaths) -> None:
    lines = [line for batch in rollouts_of(long_answers).values() for line in batch]
    assert len({line["reward"] for line in lines}) > 5
    for line in lines:
        digits = [int(word) for word in line["text"].split() if word.isdigit()]
        assert line["reward"] == pytest.approx(sum(d in (0, 2, 4) for d in digits) / max(1, len(digits)))
        assert line["loss_tokens"] == 56


def test_checkpoints_are_what_transformers_loads(short: RunPaths, tiny_guess: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert sorted(p.name for p in short.checkpoints.iterdir()) == ["version-000004", "version-000006"]
    before = AutoModelForCausalLM.from_pretrained(tiny_guess / "model").state_dict()
    after = AutoModelForCausalLM.from_pretrained(short.checkpoint(STEPS)).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    moved = max(float((before[name] - after[name]).abs().max()) for name in before)
    # Adam moves a parameter by about lr an optimiser step
    assert 5e-4 < moved < 5e-4 * 2 * STEPS * 1.5
    assert AutoTokenizer.from_pretrained(short.checkpoint(STEPS)).encode("3 higher") == [9, 3]


def test_generation_goes_on_while_the_trainer_works(long_answers: RunPaths) -> None:
    generation, training = spans_of(long_answers, "generation"), spans_of(long_answers, "training")
    assert len(training) == STEPS
    assert len(generation) == summary_of(long_answers)["groups"]["trained"] * SAMPLES
    assert any(max(g[0], t[0]) < min(g[1], t[1]) for g in generation for t in training)
    # one request, begun under one version and ended under a later one, without being resubmitted
    assert any(len(arguments["versions"]) > 1 for _, _, arguments in generation)
    mixed = [line for lines in rollouts_of(long_answers).values() for line in lines if len(line["token_versions"]) > 1]
    assert len(mixed) == summary_of(long_answers)["multi_version_trajectories"] > 0
    for line in mixed:
        versions = [v for v, _, _ in line["token_versions"]]
        assert versions == sorted(set(versions))
    assert summary_of(long_answers)["interrupted_requests"] > 0
    assert summary_of(long_answers)["lag_max"] <= ETA


def test_an_exported_checkpoint_is_the_run_s_last_and_can_be_evaluated(workspace: Workspace, short: RunPaths) -> None:
    target = workspace.folder / "exported"
    exported = workspace.call("export", str(short.root), str(target))
    assert exported.status == 0, exported.err
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (target / name).read_bytes() == (short.checkpoint(STEPS) / name).read_bytes()
    older = workspace.call("export", str(short.root), str(workspace.folder / "older"), "--checkpoint", "4")
    assert older.status == 0, older.err
    again = workspace.call("export", str(short.root), str(target))
    assert again.status == 2
    assert "exists" in again.err

    evaluated = workspace.start("eval", "exp.yaml", "trial_name=short", "--plain", "--checkpoint", str(target))
    ended = evaluated.end()
    assert ended.status == 0, ended.err
    report: dict[str, Any] = json.loads(ended.out)
    assert report["model"] == str(target)
    assert (report["episodes"], report["failed"]) == (20, 0)
    assert report["reward"] == pytest.approx(summary_of(short)["eval_after"])  # same weights, same seeds


def test_plan_and_check_start_nothing(workspace: Workspace) -> None:
    before = {p.name for p in (workspace.folder / "runs").rglob("*")} if (workspace.folder / "runs").exists() else set()
    plan = workspace.call("plan", "exp.yaml", "trial_name=planned")
    assert plan.status == 0, plan.err
    for word in ("inference-0", "train-0", "cpu", "η"):
        assert word in plan.out
    check = workspace.call("check", "exp.yaml", "trial_name=planned")
    assert check.status == 0, check.err
    assert "ok (20 training, 20 validation prompts" in check.out
    after = {p.name for p in (workspace.folder / "runs").rglob("*")} if (workspace.folder / "runs").exists() else set()
    assert after == before


def test_a_finished_run_is_not_written_over(workspace: Workspace, short: RunPaths) -> None:
    before = short.summary.read_text()
    refused = workspace.call("run", "exp.yaml", "--plain", "trial_name=short")
    assert refused.status == 2
    assert "holds an earlier run" in refused.err
    assert "--force" in refused.err
    assert short.summary.read_text() == before
