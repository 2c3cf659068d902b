"""The composition of a training run: every part is whole when it is constructed, and closed in reverse order.

session (processes) -> user code -> servers, train ranks, store -> rollouts -> loop
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from areal_like.api.batch_file import write_batch
from areal_like.api.engine import InferenceEngine
from areal_like.api.trajectory import Batch, Trajectory
from areal_like.config.experiment import ExperimentConfig
from areal_like.control.journal import BatchListener, JournalSinks, RunJournal
from areal_like.control.loop import TrainingLoop
from areal_like.control.milestones import RunMilestones
from areal_like.control.publishing import WeightPublisher
from areal_like.control.supervision import Stop, until_stopped
from areal_like.control.traced_engine import TracedEngine
from areal_like.errors import ArealLikeError, PromptsExhausted, RolloutsEnded, RpcError
from areal_like.observe.metrics import MetricsFile
from areal_like.observe.progress import RunProgress, closing_table
from areal_like.observe.summary import Summary
from areal_like.observe.trace import Tracer
from areal_like.rollout.admission import StalenessLimits
from areal_like.rollout.batch_rule import OnStale
from areal_like.rollout.breaker import Breaker
from areal_like.rollout.controller import RolloutController
from areal_like.rollout.cursor import PromptCursor
from areal_like.rollout.datasets import read_jsonl
from areal_like.rollout.dump import RolloutDump
from areal_like.rollout.executor import ExecutorSettings, GroupExecutor
from areal_like.rollout.failure import headline_of
from areal_like.rollout.filters import GroupFilters
from areal_like.rollout.ledger import GroupLedger
from areal_like.rollout.plugins import import_callable
from areal_like.rollout.store import TrajectoryStore
from areal_like.train.group import RankHealth, TrainerGroup
from areal_like.weights.channel import WeightChannel
from areal_like.weights.snapshot_folders import remove_snapshots
from launcher.ending import ending, failure_text, newest_kept
from launcher.processes import TRAIN
from launcher.session import (
    RunContext,
    Serving,
    Session,
    UserCode,
    open_serving,
    open_user_code,
    start_servers,
    start_trainer,
)

logger = logging.getLogger(__name__)

#: seconds a step under way gets to finish when the run is asked to stop, and then the checkpoint to be written; with
#: what processes get to end (launcher.session) they must stay below launcher.event_loop.FORCE_AFTER
STEP_GRACE = 2.5
SAVE_GRACE = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything the loop talks to, ready to work."""

    rollouts: RolloutController
    trainer: TrainerGroup
    channel: WeightChannel
    serving: Serving
    user: UserCode
    store: TrajectoryStore


@asynccontextmanager
async def open_parts(session: Session, tracer: Tracer) -> AsyncIterator[Parts]:
    """Start all processes at once, and wait until each is ready."""
    context, config = session.context, session.context.config
    store = TrajectoryStore()
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(store.serve(session.socket("store")))
        await start_servers(session)
        await start_trainer(session, store_address=served.address)
        user = await stack.enter_async_context(open_user_code(context))
        serving = await stack.enter_async_context(open_serving(session, user.tokenizer))
        ranks = await session.registry.expect(TRAIN, config.actor.spec.data, config.actor.start_timeout)
        trainer = await stack.enter_async_context(
            TrainerGroup([rank.address for rank in ranks], step_timeout=config.actor.step_timeout)
        )
        channel = WeightChannel(
            trainer,
            serving.pool,
            incarnation=serving.incarnation,
            interrupt=config.rollout.interrupt,
            timeout=config.weights.timeout,
        )
        yield Parts(
            rollouts=_rollouts(config, user, TracedEngine(serving.engine, tracer, track="generation"), store),
            trainer=trainer,
            channel=channel,
            serving=serving,
            user=user,
            store=store,
        )


def _rollouts(
    config: ExperimentConfig, user: UserCode, engine: InferenceEngine, store: TrajectoryStore
) -> RolloutController:
    rollout, rows = config.rollout, read_jsonl(config.train_dataset.path)
    accept = import_callable(rollout.accept_fn, "rollout.accept_fn") if rollout.accept_fn else None
    limits = StalenessLimits(
        batch_size=config.train_dataset.batch_size,
        max_head_offpolicyness=rollout.max_head_offpolicyness,
        total_train_steps=config.total_train_steps,
        max_concurrent_rollouts=rollout.max_concurrent_rollouts,
    )
    executor = GroupExecutor(
        workflow=user.workflow(config.gconfig),
        engine=engine,
        convert=user.convert,
        sink=store,
        filters=GroupFilters(accept_fn=accept, drop_equal_rewards=rollout.drop_equal_rewards),
        settings=ExecutorSettings(
            seed=config.seed,
            n_samples=config.gconfig.n_samples,
            episode_timeout=rollout.episode_timeout,
            episode_retries=rollout.episode_retries,
        ),
        breaker=Breaker(limit=rollout.breaker_failures),
    )
    return RolloutController(
        ledger=GroupLedger(limits, OnStale(rollout.on_stale)),
        executor=executor,
        cursor=PromptCursor(n_prompts=len(rows), seed=config.seed, shuffle=config.train_dataset.shuffle),
        rows=rows,
        expiry_retries=rollout.episode_retries,
        barren_limit=rollout.breaker_groups,
    )


async def train(session: Session, progress: RunProgress, stop: Stop, training: asyncio.Event) -> None:
    """Start everything, train, and write the summary, whatever ends the training.

    Args:
        training: set once the loop runs; from then on ``stop`` lets the step under way finish and saves a checkpoint.
    """
    context, started = session.context, time.monotonic()
    async with AsyncExitStack() as stack:
        progress.stage("starting processes")
        tracer = stack.enter_context(Tracer(context.paths.trace, process="controller"))
        parts = await stack.enter_async_context(open_parts(session, tracer))
        sinks = JournalSinks(
            metrics=stack.enter_context(MetricsFile(context.paths.metrics)),
            tracer=tracer,
            progress=progress,
            store=parts.store,
            listeners=await _listeners(context, parts, stack),
        )
        journal = RunJournal(sinks, statistics=parts.rollouts.statistics, started=started)
        training.set()
        try:
            kept = await _run_loop(context, parts, journal, tracer, stop)
        except Exception as error:
            with _cause_comes_first():
                _summary(context, journal, stop, failure=failure_text(error)).write(context.paths.summary)
            raise
        except asyncio.CancelledError as error:  # a process died, or the end was asked for twice
            with _cause_comes_first():
                _summary(context, journal, stop, failure=str(error) or "ended early").write(context.paths.summary)
            raise
        summary = _summary(context, journal, stop, failure=None)
        summary.write(context.paths.summary)
    if kept:
        remove_snapshots(context.paths.weights)
    ended = ending(summary.steps, context.config.total_train_steps, stop.reason)
    first = {"ended": ended, "checkpoint": newest_kept(context.paths.root)}
    progress.console.print(closing_table(summary, title=str(context.paths.root), first=first))


@contextmanager
def _cause_comes_first() -> Iterator[None]:
    """Around the summary of a run that failed: a full disk must not hide what the run failed of."""
    try:
        yield
    except ArealLikeError as error:
        logger.warning("no summary was written: %s", error)


def _summary(context: RunContext, journal: RunJournal, stop: Stop, *, failure: str | None) -> Summary:
    return journal.summary(
        experiment_name=context.config.experiment_name,
        trial_name=context.config.trial_name,
        seed=context.config.seed,
        stopped_by=stop.reason or None,
        failed_by=None if stop.asked else failure,
    )


async def _listeners(context: RunContext, parts: Parts, stack: AsyncExitStack) -> tuple[BatchListener, ...]:
    """Who gets every batch with its tokens."""
    listeners: list[BatchListener] = []
    if context.config.rollout.dump:
        dump = await stack.enter_async_context(RolloutDump(context.paths.rollouts, parts.user.tokenizer))
        listeners.append(dump.submit)
    if context.config.rollout.record_batches:
        listeners.append(_recorder(context.paths.root))
    return tuple(listeners)


def _recorder(root: Path) -> BatchListener:
    def record(batch: Batch, rows: Sequence[Trajectory]) -> None:
        write_batch(root, batch.version, rows)

    return record


async def _run_loop(context: RunContext, parts: Parts, journal: RunJournal, tracer: Tracer, stop: Stop) -> bool:
    """Returns whether all that was to be kept of the weights is in checkpoints."""
    publisher = WeightPublisher(
        channel=parts.channel,
        pool=parts.serving.pool,
        rollouts=parts.rollouts,
        journal=journal,
        # a server of ours that dies ends the run: nobody would start it again
        patience=context.config.rollout.start_timeout if context.config.rollout.servers else 0.0,
    )
    async with asyncio.TaskGroup() as background:
        watchers = [
            background.create_task(publisher.follow(), name="follow acknowledged versions"),
            background.create_task(parts.channel.readmit_recovered(), name="readmit servers"),
            background.create_task(parts.rollouts.watch(), name="watch rollouts"),
        ]
        milestones = RunMilestones(
            evaluator=parts.user.evaluator(TracedEngine(parts.serving.engine, tracer, track="evaluation")),
            evaluator_config=context.config.evaluator,
            saver_config=context.config.saver,
            trainer=parts.trainer,
            checkpoint=context.paths.checkpoint,
            journal=journal,
            background=background,
        )
        loop = TrainingLoop(
            total_train_steps=context.config.total_train_steps,
            rollouts=parts.rollouts,
            trainer=parts.trainer,
            weights=publisher,
            milestones=milestones,
            journal=journal,
        )

        async def whole() -> None:
            await until_no_batch_is_left(loop.run(), stop)
            await parts.rollouts.stop()
            if not stop.asked:
                await milestones.after_training(loop.state)

        async with parts.rollouts:
            stopped = await until_stopped(whole(), stop, ask_to_end=parts.rollouts.stop, grace=STEP_GRACE)
        kept = True
        if stopped:
            kept = await _save_before_leaving(milestones, parts.trainer, loop.state.version)
        milestones.cancel()
        for watcher in watchers:
            watcher.cancel()
    return kept


async def until_no_batch_is_left(loop: Awaitable[None], stop: Stop) -> None:
    """Run the training loop to its end: all steps, the last prompt, or the wish to stop.

    Raises:
        RolloutsEnded: rollouts ended, although nobody asked them to.
    """
    try:
        await loop
    except PromptsExhausted as error:
        logger.warning("%s", error)
    except RolloutsEnded:
        if not stop.asked:
            raise


async def _save_before_leaving(milestones: RunMilestones, trainer: TrainerGroup, version: int) -> bool:
    """Returns whether a checkpoint was saved."""
    try:
        async with asyncio.timeout(SAVE_GRACE):
            (rank, *_) = await trainer.health(SAVE_GRACE)
            await milestones.save(held_version(rank, version))
        return True
    except TimeoutError:
        logger.warning(
            "no checkpoint of version %d was saved: the trainer was at work, or took more than %g s; what "
            "saver.freq_steps saved before is still there",
            version,
            SAVE_GRACE,
        )
    except ArealLikeError as error:
        logger.warning("no checkpoint of version %d was saved: %s", version, headline_of(error))
    return False


def held_version(rank: RankHealth, version: int) -> int:
    """The version a train rank holds when it next answers, if ours is ``version``.

    An update that we gave up waiting for goes on there, and makes the version after.

    Raises:
        RpcError: the rank does not answer.
    """
    if not rank.alive:
        raise RpcError(f"train-{rank.rank} does not answer: {rank.reason}")
    return version + (rank.method == "update" or rank.version > version)
