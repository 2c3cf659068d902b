"""What a run writes down of its steps, worked out by hand from batches of known figures."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from control_cases import batch_of, receipt_of, report_of
from rich.console import Console

from areal_like.api.trajectory import Batch, Trajectory
from areal_like.config.rollout import RolloutConfig
from areal_like.control.evaluation import EvaluationReport
from areal_like.control.journal import JournalSinks, RunJournal
from areal_like.control.state import RunState
from areal_like.observe.metrics import MetricsFile, read_metrics
from areal_like.observe.progress import RunProgress
from areal_like.observe.trace import Tracer, read_trace
from areal_like.rollout.admission import AdmissionVerdict
from areal_like.rollout.batch_rule import BatchVerdict
from areal_like.rollout.breaker import BreakerStatistics
from areal_like.rollout.executor import ExecutorStatistics
from areal_like.rollout.statistics import RolloutStatistics
from areal_like.weights.channel import PublicationTimes, ServerCalls

EVALUATION = EvaluationReport(
    version=0, versions=(0, 1), reward=0.5, episodes=8, rejected=1, failed=2, tokens=30, seconds=1.5
)


def _statistics(generated_tokens: int, **groups: int) -> RolloutStatistics:
    breaker = BreakerStatistics(in_a_row=0, total=0, limit=32)
    episodes = ExecutorStatistics(
        accepted=0, rejected=0, failed=4, lost=0, generated_tokens=generated_tokens, breaker=breaker
    )
    return RolloutStatistics(
        acknowledged=0,
        batches_taken=0,
        admitted=9,
        live=3,
        running=2,
        finished=1,
        taken=0,
        groups=groups,
        reasons={},
        admission=AdmissionVerdict.ADMIT,
        batch=None,
        batches_waited={},
        lag_last=(),
        lag_max=0,
        lag_mean=0.0,
        multi_version_trajectories=0,
        expired_groups=0,
        expired_tokens=0,
        expired_by_length={},
        episodes=episodes,
        epoch=1,
        prompts_returned=0,
    )


class Store:
    def get(self, keys: Sequence[str]) -> list[Trajectory]:
        ids = np.arange(5, dtype=np.int32)
        row = Trajectory(
            token_ids=ids, loss_mask=ids, logprobs=ids.astype(np.float32), versions=ids, reward=0.0, group_id="g"
        )
        return [replace(row, episode_id=key) for key in keys]


@dataclass(slots=True)
class Desk:
    """A journal with real files; the test moves its clock and its rollouts' figures."""

    folder: Path
    journal: RunJournal
    said: StringIO
    heard: list[tuple[Batch, Sequence[Trajectory]]]
    now: float = 100.0
    statistics: RolloutStatistics = field(default_factory=lambda: _statistics(0))

    @property
    def lines(self) -> list[dict[str, object]]:
        return list(read_metrics(self.folder / "metrics.jsonl"))


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    said, heard = StringIO(), list[tuple[Batch, Sequence[Trajectory]]]()
    progress = RunProgress(2, console=Console(file=said, width=200), live=False)
    sinks = JournalSinks(
        metrics=MetricsFile(tmp_path / "metrics.jsonl"),
        tracer=Tracer(tmp_path / "trace.json", process="controller"),
        progress=progress,
        store=Store(),
        listeners=(lambda batch, rows: heard.append((batch, rows)),),
    )
    made: list[Desk] = []
    journal = RunJournal(sinks, statistics=lambda: made[0].statistics, now=lambda: made[0].now if made else 100.0)
    made.append(Desk(tmp_path, journal, said, heard))
    with progress, sinks.metrics, sinks.tracer:
        yield made[0]


def _step(desk: Desk, batch: Batch, *, waited: float, published: float) -> None:
    """One step of the loop, as the loop and the publisher tell it."""
    desk.now += waited
    desk.journal.taken(batch)
    with desk.journal.training(batch.version):
        desk.now += 0.5
    with desk.journal.publication(batch.version + 1):
        desk.now += published
    desk.journal.published((receipt_of(batch.version + 1, "a"), receipt_of(batch.version + 1, "b")))
    state = RunState(step=batch.version + 1, version=batch.version + 1)
    desk.journal.step(state, batch, report_of(batch.version))


@pytest.mark.parametrize(
    ("figure", "part", "section"),
    [
        ("train/skipped_minibatches", "policy", "actor.optimizer"),
        ("critic/skipped_minibatches", "critic", "critic.optimizer"),
    ],
)
def test_steps_that_were_left_out_are_told_ever_less_often(
    desk: Desk, caplog: pytest.LogCaptureFixture, figure: str, part: str, section: str
) -> None:
    for step in range(1, 10):
        state, skipped = RunState(step=step, version=step), 0.0 if step == 2 else 3.0
        desk.journal.step(state, batch_of(step - 1), replace(report_of(step - 1), metrics={figure: skipped}))
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0] for text in told] == [
        "step 1",
        "step 3",
        "step 5",
        "step 9",
    ]  # its 1st, 2nd, 4th, 8th
    assert all(
        f"3 optimiser steps of the {part} were left out" in text and f"lower {section}.lr" in text for text in told
    )


def test_a_step_s_line_holds_its_own_figures(desk: Desk) -> None:
    desk.now = 110.0
    desk.journal.begin()
    desk.statistics = _statistics(40, trained=0, failed=1)
    _step(desk, batch_of(0, groups=2, rewards=(0.0, 1.0, 1.0)), waited=1.0, published=0.5)
    desk.statistics = _statistics(100)
    _step(desk, replace(batch_of(1, groups=1, lag=1), version=1), waited=2.5, published=0.5)
    first, second = desk.lines
    assert (first["step"], first["version"], first["reward"]) == (1, 1, pytest.approx(2 / 3))
    assert (first["seconds"], first["step_seconds"], first["wait_seconds"]) == (12.0, 2.0, 1.0)
    assert (first["update_seconds"], first["publish_seconds"]) == (0.5, 0.5)
    assert first["tokens_per_second"] == 40 / 2.0
    assert (first["pause_seconds"], first["interrupted_requests"]) == (0.5, 6)  # of both servers
    assert first["batch"] == {
        "groups": 2,
        "trajectories": 6,
        "tokens": 30,
        "loss_tokens": 18,
        "multi_version_trajectories": 0,
        "lag_histogram": {"0": 2},
    }
    assert first["train"] == {"train/loss": 0.25}
    assert (first["rollout"]["groups"], first["rollout"]["failed_episodes"]) == ({"trained": 0, "failed": 1}, 4)
    assert (second["step_seconds"], second["wait_seconds"]) == (3.5, 2.5)
    assert second["tokens_per_second"] == pytest.approx(60 / 3.5, rel=1e-4)  # generated since the line before
    assert (second["lag_mean"], second["lag_max"], second["batch"]["lag_histogram"]) == (1.0, 1, {"1": 1})
    assert second["batch"]["multi_version_trajectories"] == 1
    assert "step 2/2  reward 0.500  lag 1.0 (max 1)" in desk.said.getvalue()


def test_a_step_tells_what_the_rules_cost(desk: Desk) -> None:
    """What docs/staleness.md says of the statistics is in the run's own file, and keys of numbers are JSON's."""
    desk.statistics = replace(
        _statistics(0),
        admission=AdmissionVerdict.STALENESS,
        batches_waited={"too_few": 3, "older_first": 1},
        expired_groups=2,
        expired_tokens=37,
        expired_by_length={16: 1, 8: 3},
    )
    _step(desk, batch_of(0), waited=0, published=0)
    told = desk.lines[0]["rollout"]
    assert (told["admission"], told["batches_waited"]) == ("staleness", {"too_few": 3, "older_first": 1})
    assert (told["expired_groups"], told["expired_tokens"]) == (2, 37)
    assert list(told["expired_by_length"].items()) == [("8", 3), ("16", 1)]


def test_what_the_page_on_staleness_names_is_in_the_file(desk: Desk) -> None:
    """Every figure of metrics.jsonl that the page names, as in ``rollout.admission``, with the values that it names."""
    _step(desk, batch_of(0), waited=0, published=0)
    page = (Path(__file__).parents[3] / "docs" / "staleness.md").read_text(encoding="utf-8")
    figures = [name for name in re.findall(r"`rollout\.(\w+)`", page) if name not in RolloutConfig.model_fields]
    assert {"admission", "batches_waited", "expired_by_length"} <= set(figures)
    assert set(figures) <= set(desk.lines[0]["rollout"])
    verdicts = {verdict.value for verdict in (*AdmissionVerdict, *BatchVerdict)}
    assert {"staleness", "concurrency", "end_of_run", "too_few", "older_first"} <= verdicts & set(
        re.findall(r"`(\w+)`", page)
    )


def test_a_step_tells_where_its_publication_s_seconds_went(desk: Desk) -> None:
    """The export, and the calls to the server that took longest over both, with its own words on them."""
    parts = {"pause": 0.1, "load": 0.15, "load.verify": 0.05}
    slow = receipt_of(1, "b").model_copy(update={"seconds_by_part": parts})
    calls = {"a": ServerCalls(stage=0.75, commit=0.25), "b": ServerCalls(stage=0.5, commit=1.0)}
    desk.journal.published((receipt_of(1, "a"), slow), PublicationTimes(export=0.25, servers=calls))
    desk.journal.step(RunState(step=1, version=1), batch_of(0), report_of(0))
    desk.journal.published((receipt_of(2, "a"),), PublicationTimes(export=0.5, servers={"a": calls["a"]}))
    desk.journal.step(RunState(step=2, version=2), batch_of(1), report_of(1))
    desk.journal.published((receipt_of(3),))  # nobody measured
    desk.journal.step(RunState(step=3, version=3), batch_of(2), report_of(2))
    told = {"stage.server": 0.1, "commit.paused": 0.25}
    inside = {"commit.paused.pause": 0.1, "commit.paused.load": 0.15, "commit.paused.load.verify": 0.05}
    assert [line["publication"] for line in desk.lines] == [
        {"export": 0.25, "stage": 0.5, "commit": 1.0, **told, **inside},
        {"export": 0.5, "stage": 0.75, "commit": 0.25, **told},
        {},
    ]


def test_the_reward_is_the_mean_over_episodes_however_many_rows_they_left(desk: Desk) -> None:
    (group,) = batch_of(0, rewards=(1.0, 0.0, 0.0)).groups
    first, second, third = group.trajectories
    rows = (first, second, replace(third, episode_id=second.episode_id))
    _step(desk, Batch(version=0, groups=(replace(group, trajectories=rows),)), waited=0, published=0)
    assert desk.lines[0]["reward"] == 0.5
    _step(desk, Batch(version=1, groups=()), waited=0, published=0)  # a batch that shrank to nothing
    assert desk.lines[1]["reward"] is None


def test_listeners_get_the_rows_of_every_trajectory_in_order(desk: Desk) -> None:
    batch = batch_of(0, groups=2)
    desk.journal.taken(batch)
    ((heard, rows),) = desk.heard
    assert heard is batch
    assert [row.episode_id for row in rows] == [t.key for t in batch.trajectories]


def test_an_evaluation_is_a_line_of_its_own_and_one_for_people(desk: Desk) -> None:
    desk.journal.evaluated(EVALUATION)
    (line,) = desk.lines
    assert line["evaluation"]["versions"] == [0, 1]
    assert line["evaluation"]["reward"] == 0.5
    assert "evaluation at version 0, 1: 0.500 (8 episodes, 2 failed, 1.5 s)" in desk.said.getvalue()
    desk.journal.evaluated(replace(EVALUATION, reward=None, versions=(), version=3))
    assert "evaluation at version 3: –" in desk.said.getvalue()


def test_the_summary_adds_up(desk: Desk) -> None:
    desk.journal.published((receipt_of(0),))
    desk.journal.evaluated(EVALUATION)
    _step(desk, batch_of(0, groups=2, rewards=(0.0, 0.0)), waited=1, published=1)
    _step(desk, batch_of(1, groups=2, lag=1), waited=1, published=1)
    desk.journal.evaluated(replace(EVALUATION, reward=None))  # nothing came back: no score
    desk.journal.evaluated(replace(EVALUATION, reward=0.75))
    desk.statistics = _statistics(77, trained=4, stale=2, unheard_of=9)
    summary = desk.journal.summary(stopped_by=None).to_dict()
    assert summary["seconds"] == 5.0
    assert (summary["steps"], summary["versions_published"]) == (2, 3)
    assert (summary["reward_first"], summary["reward_last"]) == (0.0, 0.5)
    assert (summary["eval_before"], summary["eval_after"]) == (0.5, 0.75)
    assert (summary["lag_max"], summary["lag_mean"]) == (1, 0.5)
    assert summary["groups"] == {"trained": 4, "filtered": 0, "failed": 0, "stale": 2, "cancelled": 0}
    assert (summary["generated_tokens"], summary["trained_tokens"]) == (77, 24)
    assert (summary["interrupted_requests"], summary["pause_seconds_total"]) == (15, 1.25)
    assert (summary["weight_bytes_total"], summary["multi_version_trajectories"]) == (5000, 2)
    assert summary["stopped_by"] is None


def test_seconds_count_from_the_start_of_the_run(tmp_path: Path, desk: Desk) -> None:
    journal = RunJournal(desk.journal._sinks, statistics=lambda: desk.statistics, now=lambda: 100.0, started=90.0)
    assert journal.summary().seconds == 10.0


def test_updates_and_publications_are_spans_of_the_timeline(desk: Desk) -> None:
    _step(desk, batch_of(0), waited=0, published=0)
    desk.journal._sinks.tracer.close()
    events = read_trace(desk.folder / "trace.json")
    assert [e["name"] for e in events if e["ph"] == "X"] == ["update 0", "publish 1"]
    assert [e["name"] for e in events if e["ph"] == "i"] == ["commit 1 on a", "commit 1 on b"]
    assert [e["args"] for e in events if e["ph"] == "C"] == [{"running": 2, "finished": 1}]
    json.loads((desk.folder / "trace.json").read_text())
