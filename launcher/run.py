"""``run`` and ``eval``: what they do on their event loop, and what ends it."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Coroutine
from dataclasses import asdict
from functools import partial
from typing import Any

from areal_like.api.weights import CommitReceipt
from areal_like.client.control import TellsDigest
from areal_like.config.experiment import ExperimentConfig
from areal_like.config.paths import RunPaths
from areal_like.control.supervision import Stop, supervise
from areal_like.errors import ArealLikeError, ConfigError, EpisodeError
from areal_like.observe.logs import setup_logging
from areal_like.observe.loop_lag import LoopLagMonitor
from areal_like.observe.progress import RunProgress
from launcher.event_loop import Interrupted, run_to_end
from launcher.session import RunContext, Serving, Session, open_serving, open_session, open_user_code, start_servers
from launcher.training import train

logger = logging.getLogger(__name__)

#: seconds one server may take to digest the weights it was started with
_DIGEST_TIMEOUT = 300.0


def run_experiment(config: ExperimentConfig, *, paths: RunPaths, run_id: str, live: bool | None) -> int:
    """Train; returns the exit status. The run's folder is held by the caller.

    Raises:
        ArealLikeError: what ended the run.
    """
    progress = RunProgress(config.total_train_steps, live=live)
    context = RunContext(config=config, paths=paths, run_id=run_id)
    setup_logging("controller", path=paths.logs / "controller.log", console=progress.console_log())
    with progress:
        return run_to_end(partial(_train, context, progress), run_id=run_id)


def evaluate_checkpoint(config: ExperimentConfig, *, run_id: str, live: bool | None) -> int:
    """Evaluate ``config.model`` on the validation set; prints the report as JSON and returns the exit status.

    Raises:
        ArealLikeError: what ended the evaluation.
    """
    paths = RunPaths(root=RunPaths.of(config).evaluations / run_id)
    paths.create()
    progress = RunProgress(1, live=live)
    setup_logging("controller", path=paths.logs / "controller.log", console=progress.console_log())
    context = RunContext(config=config, paths=paths, run_id=run_id)
    return run_to_end(partial(_evaluate, context, progress), run_id=run_id)


async def _train(context: RunContext, progress: RunProgress, stop: Stop) -> None:
    training = asyncio.Event()
    async with LoopLagMonitor(), open_session(context) as session:
        work = train(session, progress, stop, training)
        await _supervised(work, session, stop, _interrupted(stop, training))


async def _supervised(
    work: Coroutine[Any, Any, None], session: Session, stop: Stop, interrupted: Coroutine[Any, Any, None]
) -> None:
    try:
        await supervise(work, (session.launcher.watch(), interrupted))
    finally:
        stop.work_ended = True


async def _interrupted(stop: Stop, training: asyncio.Event) -> None:
    """Ends the work at once if it does not listen to ``stop`` yet, or if the wish was repeated."""
    await stop.wait()
    if not training.is_set():
        raise Interrupted("before training began: no step was made, and there is nothing to keep")
    logger.warning("%s: saving a checkpoint before the end; once more to end at once", stop.reason)
    await stop.wait_urgent()
    raise Interrupted("at once, since it was asked twice: no checkpoint was saved on the way out")


async def _evaluation_interrupted(stop: Stop) -> None:
    await stop.wait()
    raise Interrupted("before the evaluation was done")


async def _evaluate(context: RunContext, progress: RunProgress, stop: Stop) -> None:
    async with open_session(context) as session:
        work = _evaluate_in(session, progress)
        await _supervised(work, session, stop, _evaluation_interrupted(stop))


async def _evaluate_in(session: Session, progress: RunProgress) -> None:
    config = session.context.config
    progress.stage(f"starting {config.rollout.spec.data} servers with {config.model.path}")
    await start_servers(session)
    async with (
        open_user_code(session.context) as user,
        open_serving(session, user.tokenizer, commands=False) as serving,
    ):
        await _serve_as_loaded(session, serving)
        evaluator = user.evaluator(serving.engine)
        if evaluator is None:
            raise ConfigError("valid_dataset: is required to evaluate; name a JSONL file")
        progress.stage("evaluating")
        report = await evaluator.evaluate()
    sys.stdout.write(json.dumps({"model": config.model.path, **asdict(report)}, indent=2) + "\n")
    if report.failed and not report.episodes:
        raise EpisodeError(
            f"all {report.failed} evaluation episodes failed; {session.context.paths.logs / 'controller.log'} has "
            f"their tracebacks"
        )


async def _serve_as_loaded(session: Session, serving: Serving) -> None:
    """Servers serve what they were started with: their own digest is the receipt."""
    for name in serving.pool.publication_targets():
        control = serving.pool.weight_server(name)
        if not isinstance(control, TellsDigest):
            raise ArealLikeError(f"{name}: its engine cannot tell what it serves")
        answer = await control.digest(timeout=_DIGEST_TIMEOUT)
        serving.pool.acknowledge(
            CommitReceipt(
                server=name,
                incarnation=0,
                version=max(answer.version, 0),
                digest=answer.digest,
                bytes=0,
                seconds_staged=0.0,
                seconds_paused=0.0,
                interrupted_requests=0,
            )
        )
