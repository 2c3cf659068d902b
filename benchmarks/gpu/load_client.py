"""Our side of ``generation.py`` and ``embedded_decode.py``: puts load on one server through our client or controller.

``python load_client.py`` reads one JSON object a line (:class:`Load`'s fields and ``url``), and writes ``@`` and a JSON
object a line. The server's token is in ``AREAL_LIKE_TOKEN``.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from areal_like.api.engine import InferenceEngine
from areal_like.api.generation import GenerationHyperparameters, ModelRequest, ModelResponse
from areal_like.api.trajectory import Trajectory
from areal_like.api.transcript import Transcript
from areal_like.api.weights import CommitReceipt, TransportKind
from areal_like.api.workflow import RolloutWorkflow
from areal_like.client.control import TellsDigest
from areal_like.client.generation import RemoteEngine
from areal_like.client.health import HealthPolicy
from areal_like.client.pool import ServerPool
from areal_like.inference.backends import get_backend
from areal_like.inference.backends.base import LinkSettings
from areal_like.rollout.admission import StalenessLimits
from areal_like.rollout.batch_rule import OnStale
from areal_like.rollout.breaker import Breaker
from areal_like.rollout.controller import RolloutController
from areal_like.rollout.convert import to_trajectories
from areal_like.rollout.cursor import PromptCursor
from areal_like.rollout.executor import ExecutorSettings, GroupExecutor
from areal_like.rollout.filters import GroupFilters
from areal_like.rollout.ledger import GroupLedger
from areal_like.rollout.store import TrajectoryStore

#: seconds for control calls, and for one answer
_CONTROL, _ANSWER = 30.0, 300.0
#: functions that a profile lists
_LISTED = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One turn. ``what``: engine or controller; ``prompt`` and ``answer`` in tokens, exactly."""

    what: str
    requests: int = 8
    concurrency: int = 4
    prompt: int = 16
    answer: int = 8
    seeded: bool = False
    profiled: bool = False
    backend: str = "vllm"


@asynccontextmanager
async def engine_over(url: str, token: str, backend: str) -> AsyncIterator[RemoteEngine]:
    """An engine over one server that serves what it was started with."""
    found = get_backend(backend)
    version = await found.version(url, token=token, timeout=_CONTROL)
    settings = LinkSettings(token=token, version=version, transport=TransportKind.SHM, timeout=_CONTROL, attached=True)
    link = found.connect("server", url, settings)
    async with ServerPool(HealthPolicy(timeout=_CONTROL)) as pool:
        await pool.add("server", url, link.control, link.dialect)
        if not isinstance(link.control, TellsDigest):
            raise RuntimeError(f"{backend}: its server cannot tell what it serves")
        answer = await link.control.digest(timeout=_CONTROL)
        pool.acknowledge(
            CommitReceipt(
                server="server",
                incarnation=0,
                version=max(answer.version, 0),
                digest=answer.digest,
                bytes=0,
                seconds_staged=0.0,
                seconds_paused=0.0,
                interrupted_requests=0,
            )
        )
        async with RemoteEngine(pool, token=token, timeout=_ANSWER) as engine:
            yield engine


def prompts(load: Load) -> list[list[int]]:
    """Random ids, above the special ones and within every model's vocabulary here."""
    rng = random.Random(load.requests)
    return [[rng.randrange(100, 1000) for _ in range(load.prompt)] for _ in range(load.requests)]


def sampling(load: Load) -> GenerationHyperparameters:
    return GenerationHyperparameters(max_new_tokens=load.answer, temperature=1.0, ignore_eos=True)


async def through_engine(engine: RemoteEngine, load: Load, asked: Sequence[list[int]]) -> int:
    """``concurrency`` askers that each ask again as soon as they are answered; returns the tokens written."""
    waiting, gconfig, tokens = iter(asked), sampling(load), 0
    seeds = random.Random(1)

    async def ask() -> None:
        nonlocal tokens
        for ids in waiting:
            seed = seeds.getrandbits(62) if load.seeded else None
            answer = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=gconfig, seed=seed))
            tokens += answer.output_len

    async with asyncio.TaskGroup() as askers:
        for _ in range(load.concurrency):
            askers.create_task(ask())
    return tokens


class OneRequest(RolloutWorkflow):
    """One request an episode, rewarded with 0."""

    def __init__(self, gconfig: GenerationHyperparameters, asked: Sequence[list[int]]) -> None:
        self._gconfig = gconfig
        self._asked = asked

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory:
        transcript = Transcript()
        transcript.add_context(self._asked[data["index"]])
        transcript.add_answer(await engine.agenerate(ModelRequest(input_ids=transcript.ids, gconfig=self._gconfig)))
        return transcript.build(0.0)


class Unseeded:
    """The engine without the seeds that episodes get."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        return await self._engine.agenerate(replace(request, seed=None))

    def get_version(self) -> int:
        return self._engine.get_version()


async def through_controller(engine: RemoteEngine, load: Load, asked: Sequence[list[int]]) -> int:
    """One batch of all requests through admission, episodes, conversion and the store; returns the tokens written."""
    store = TrajectoryStore()
    executor = GroupExecutor(
        workflow=OneRequest(sampling(load), asked),
        engine=engine if load.seeded else Unseeded(engine),
        convert=to_trajectories,
        sink=store,
        filters=GroupFilters(),
        settings=ExecutorSettings(seed=1, n_samples=1, episode_timeout=_ANSWER, episode_retries=0),
        breaker=Breaker(limit=8),
    )
    limits = StalenessLimits(
        batch_size=load.requests,
        max_head_offpolicyness=0,
        total_train_steps=1,
        max_concurrent_rollouts=load.concurrency,
    )
    rollouts = RolloutController(
        ledger=GroupLedger(limits, OnStale.WAIT),
        executor=executor,
        cursor=PromptCursor(n_prompts=load.requests, seed=1, shuffle=False),
        rows=[{"index": index} for index in range(load.requests)],
    )
    async with rollouts:
        rollouts.acknowledged(0)
        batch = await rollouts.take_batch(0)
        rollouts.release(batch)
    return sum(row.loss_tokens for row in batch.trajectories)


async def one_turn(load: Load, url: str, token: str) -> dict[str, Any]:
    """The reading of one turn."""
    through = through_controller if load.what == "controller" else through_engine
    asked = prompts(load)
    async with engine_over(url, token, load.backend) as engine:
        profile = cProfile.Profile()
        cpu, began = time.process_time(), time.perf_counter()
        if load.profiled:
            profile.enable()
        tokens = await through(engine, load, asked)
        profile.disable()
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        retries = engine.statistics().retries
    expected = load.requests * load.answer
    if tokens != expected:
        raise RuntimeError(f"{tokens} tokens came back, {expected} were asked for")
    found = {
        "tokens_per_second": tokens / seconds,
        "requests_per_second": load.requests / seconds,
        "seconds": seconds,
        "client_cpu_share": round(cpu / seconds, 3),
        "retries": retries,
    }
    return found | ({"profile": most_costly(profile)} if load.profiled else {})


def most_costly(profile: cProfile.Profile) -> list[str]:
    """Functions by their own seconds: ``seconds calls where``."""
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    rows = sorted(stats.items(), key=lambda row: -row[1][2])[:_LISTED]
    return [f"{own:.3f} {calls} {'/'.join(file.split('/')[-2:])}:{line} {name}"
            for (file, line, name), (_, calls, own, _, _) in rows]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    token = os.environ.get("AREAL_LIKE_TOKEN", "")
    if not token:
        parser.error("AREAL_LIKE_TOKEN is not set: it is the bearer token of the server to be loaded")
    print("@ready", flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        url = work.pop("url")
        try:
            found = uvloop.run(one_turn(Load(**work), url, token))
        except Exception as error:  # the next turn may succeed
            found = {"error": repr(error)[:2000]}
        print("@" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
