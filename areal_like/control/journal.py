"""What a run writes down: a line of metrics a step, the timeline, the dumps, live progress, and the summary's figures.

It only listens. Nothing here may hold up rollouts or training: dumps go to a thread, lines are short.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Protocol

from areal_like.api.trajectory import Batch, Trajectory, UpdateReport
from areal_like.api.weights import CommitReceipt
from areal_like.control.evaluation import EvaluationReport
from areal_like.control.state import RunState
from areal_like.observe.metrics import MetricsFile
from areal_like.observe.progress import RunProgress, StepFigures
from areal_like.observe.summary import GroupCounts, RunTally, Summary
from areal_like.observe.trace import Tracer
from areal_like.rollout.statistics import RolloutStatistics
from areal_like.weights.channel import PublicationTimes


class BatchReader(Protocol):
    """Where the tokens of a batch can be read."""

    def get(self, keys: Sequence[str]) -> list[Trajectory]: ...


logger = logging.getLogger(__name__)

#: what may leave optimiser steps out: its name, the figure that counts them, and the section that says how it learns
SKIPPED = (
    ("policy", "train/skipped_minibatches", "actor.optimizer"),
    ("critic", "critic/skipped_minibatches", "critic.optimizer"),
)

#: told of each batch with its trajectories, when it is taken; must not block
BatchListener = Callable[[Batch, Sequence[Trajectory]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSinks:
    """Where the journal writes. ``listeners`` get whole batches (dumps, recordings)."""

    metrics: MetricsFile
    tracer: Tracer
    progress: RunProgress
    store: BatchReader
    listeners: tuple[BatchListener, ...] = ()


class RunJournal:
    """One per run; ``statistics`` reads the rollout controller's snapshot.

    Seconds are counted from ``started``, a reading of ``now`` (monotonic): the run's start, or else this moment.
    """

    def __init__(
        self,
        sinks: JournalSinks,
        *,
        statistics: Callable[[], RolloutStatistics],
        now: Callable[[], float] = time.monotonic,
        started: float | None = None,
    ) -> None:
        self._sinks = sinks
        self._statistics = statistics
        self._now = now
        self._tally = RunTally()
        self._started = now() if started is None else started
        self._step_began = self._taken_at = now()
        self._publish_seconds = 0.0
        self._tokens_before = 0
        self._receipts: tuple[CommitReceipt, ...] = ()
        self._times: PublicationTimes | None = None
        self._skipped: dict[str, int] = {}

    def begin(self) -> None:
        """Training begins: the first step's waiting time counts from here."""
        self._step_began = self._now()
        self._sinks.progress.begin()

    def taken(self, batch: Batch) -> None:
        """A batch was taken: note its lags, and hand its trajectories to the listeners."""
        self._taken_at = self._now()
        multi = sum(t.oldest_version != t.newest_version for t in batch.trajectories)
        self._tally.taken(lags=batch.lags, multi_version_trajectories=multi)
        if self._sinks.listeners:
            rows = self._sinks.store.get([t.key for t in batch.trajectories])
            for listener in self._sinks.listeners:
                listener(batch, rows)

    @contextmanager
    def training(self, version: int) -> Iterator[None]:
        """Around the update that consumes the batch of ``version``."""
        with self._sinks.tracer.span("training", f"update {version}", version=version):
            yield

    @contextmanager
    def publication(self, version: int) -> Iterator[None]:
        """Around a publication."""
        began = self._now()
        with self._sinks.tracer.span("weights", f"publish {version}", version=version):
            yield
        self._publish_seconds = self._now() - began

    def published(self, receipts: tuple[CommitReceipt, ...], times: PublicationTimes | None = None) -> None:
        """``times``: where the publication's seconds went, where that is known."""
        self._receipts, self._times = receipts, times
        self._tally.published(
            pause_seconds=sum(r.seconds_paused for r in receipts),
            interrupted_requests=sum(r.interrupted_requests for r in receipts),
            weight_bytes=sum(r.bytes for r in receipts),
        )
        for receipt in receipts:
            self._sinks.tracer.instant("weights", f"commit {receipt.version} on {receipt.server}")

    def step(self, state: RunState, batch: Batch, report: UpdateReport) -> None:
        """A step is over and its version published."""
        now, statistics = self._now(), self._statistics()
        reward = _mean_episode_reward(batch)
        self._tally.trained(reward=reward, tokens=sum(t.loss_tokens for t in batch.trajectories))
        seconds = now - self._step_began
        generated = statistics.episodes.generated_tokens - self._tokens_before
        self._tokens_before = statistics.episodes.generated_tokens
        lags = batch.lags
        figures = StepFigures(
            step=state.step,
            reward=reward,
            lag_mean=sum(lags) / len(lags) if lags else 0.0,
            lag_max=max(lags, default=0),
            tokens_per_second=generated / seconds if seconds > 0 else 0.0,
        )
        self._sinks.progress.step(figures)
        self._warn_of_skips(state.step, report)
        self._sinks.metrics.write(
            {
                **asdict(figures),
                "version": state.version,
                "seconds": now - self._started,
                "step_seconds": seconds,
                "wait_seconds": self._taken_at - self._step_began,
                "update_seconds": report.seconds,
                "publish_seconds": self._publish_seconds,
                "pause_seconds": sum(r.seconds_paused for r in self._receipts),
                "publication": _publication_figures(self._receipts, self._times),
                "interrupted_requests": sum(r.interrupted_requests for r in self._receipts),
                "batch": _batch_figures(batch),
                "train": dict(report.metrics),
                "rollout": _rollout_figures(statistics),
            }
        )
        self._sinks.tracer.counter("rollouts", running=statistics.running, finished=statistics.finished)
        self._step_began = now

    def _warn_of_skips(self, step: int, report: UpdateReport) -> None:
        """Training that stands still looks like any other: it is told at the first such step, the 2nd, 4th, 8th, ..."""
        for part, figure, section in SKIPPED:
            if report.metrics.get(figure, 0.0) > 0:
                self._skipped[part] = count = self._skipped.get(part, 0) + 1
                if count & (count - 1) == 0:
                    logger.warning(
                        "step %d: %d optimiser steps of the %s were left out, their gradients not being finite (so far "
                        "in %d steps of the run); look at the steps before it in metrics.jsonl; lower %s.lr or "
                        "%s.gradient_clipping",
                        step,
                        report.metrics[figure],
                        part,
                        count,
                        section,
                        section,
                    )

    def evaluated(self, report: EvaluationReport) -> None:
        if report.reward is not None:
            self._tally.evaluated(report.reward)
        self._sinks.metrics.write({"evaluation": asdict(report), "seconds": self._now() - self._started})
        shown = "–" if report.reward is None else f"{report.reward:.3f}"
        failed = f", {report.failed} failed" if report.failed else ""
        versions = ", ".join(map(str, report.versions)) or str(report.version)
        took = f"{report.episodes} episodes{failed}, {report.seconds:.1f} s"
        self._sinks.progress.note(f"evaluation at version {versions}: {shown} ({took})")

    def stage(self, name: str) -> None:
        """Say what the run does now."""
        self._sinks.progress.stage(name)

    def summary(self, **extra: object) -> Summary:
        statistics = self._statistics()
        return self._tally.summary(
            seconds=self._now() - self._started,
            groups=GroupCounts(**{name: statistics.groups.get(name, 0) for name in GroupCounts.__dataclass_fields__}),
            generated_tokens=statistics.episodes.generated_tokens,
            extra=dict(extra),
        )


def _mean_episode_reward(batch: Batch) -> float | None:
    """An episode that left several trajectories counts once, with their mean."""
    episodes: dict[str, list[float]] = {}
    for row in batch.trajectories:
        episodes.setdefault(row.episode_id, []).append(row.reward)
    return sum(sum(rewards) / len(rewards) for rewards in episodes.values()) / len(episodes) if episodes else None


def _batch_figures(batch: Batch) -> dict[str, object]:
    histogram: dict[str, int] = {}
    for lag in batch.lags:
        histogram[str(lag)] = histogram.get(str(lag), 0) + 1
    rows = batch.trajectories
    return {
        "groups": len(batch.groups),
        "trajectories": len(rows),
        "tokens": sum(t.length for t in rows),
        "loss_tokens": sum(t.loss_tokens for t in rows),
        "multi_version_trajectories": sum(t.oldest_version != t.newest_version for t in rows),
        "lag_histogram": dict(sorted(histogram.items())),
    }


def _publication_figures(receipts: Sequence[CommitReceipt], times: PublicationTimes | None) -> dict[str, float]:
    """Seconds of the export, and of the calls to the server that took longest over both of them.

    A dot means "of it": within ``commit`` the server was paused for ``commit.paused``, of which ``commit.paused.load``.
    ``stage.server`` is the server's own word; what it does not tell is left out.
    """
    if times is None:
        return {}
    found = {"export": times.export}
    if receipts:
        slowest = max(receipts, key=lambda r: times.servers[r.server].stage + times.servers[r.server].commit)
        calls = times.servers[slowest.server]
        found |= {"stage": calls.stage, "stage.server": slowest.seconds_staged}
        found |= {"commit": calls.commit, "commit.paused": slowest.seconds_paused}
        found |= {f"commit.paused.{part}": seconds for part, seconds in slowest.seconds_by_part.items()}
    return found


def _rollout_figures(statistics: RolloutStatistics) -> dict[str, object]:
    """Counts since the run began, but for ``live``, ``running``, ``finished`` and ``admission``, which are of now."""
    return {
        "live": statistics.live,
        "running": statistics.running,
        "finished": statistics.finished,
        "admitted": statistics.admitted,
        "admission": statistics.admission.value,
        "batches_waited": dict(statistics.batches_waited),
        "groups": dict(statistics.groups),
        "generated_tokens": statistics.episodes.generated_tokens,
        "failed_episodes": statistics.episodes.failed,
        "expired_groups": statistics.expired_groups,
        "expired_tokens": statistics.expired_tokens,
        "expired_by_length": {str(length): count for length, count in sorted(statistics.expired_by_length.items())},
        "epoch": statistics.epoch,
    }
