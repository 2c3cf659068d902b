"""What the benchmarks of weight updates do: keep a server writing, publish to it, and see what it holds.

Used by weight_sync.py, gpu/weight_sync.py and gpu/two_gpu.py.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from sync_policy import Policy
from sync_servers import TOKEN, Server

from areal_like.api.generation import GenerationHyperparameters, ModelRequest, ModelResponse, StopReason
from areal_like.api.weights import CommitReceipt, InterruptMode, Manifest, TransportKind
from areal_like.api.wire import GenerateBody
from areal_like.client.control import ServerControl
from areal_like.client.dialect import Segment
from areal_like.client.generation import RemoteEngine
from areal_like.client.health import HealthPolicy
from areal_like.client.pool import ServerPool
from areal_like.inference.backends import get_backend
from areal_like.inference.backends.base import LinkSettings
from areal_like.inference.backends.vllm_dialect import CutDialect
from areal_like.weights.channel import WeightChannel
from areal_like.weights.segments import remove_segments
from areal_like.weights.transports.base import WeightWriter, make_writer

#: seconds between two looks at a server that fills up
_LOOK = 0.05
#: tokens of a prompt, and of an answer that is compared with a forward pass
PROMPT, CHECKED = 24, 16
#: mean |log-prob - forward pass| of a token: above what bf16 explains, far below two versions' distance (1.1 to 1.2)
MOST_APART = 0.2


@dataclass(slots=True, kw_only=True)
class Exporter:
    """The trainer's side of a channel. ``began`` is called when a version's bytes are asked for."""

    writer: WeightWriter
    policy: Policy

    async def export_weights(self, version: int, incarnation: int) -> Manifest:
        return await asyncio.to_thread(self._write, version, incarnation)

    def _write(self, version: int, incarnation: int) -> Manifest:
        if self.policy.device.type == "cuda":
            torch.cuda.set_device(self.policy.device)
        return self.writer.write(version, incarnation, iter(self.policy.weights.items()))


class Watched:
    """A server's control that says when a version's bytes begin to move."""

    def __init__(self, control: ServerControl) -> None:
        self._control = control
        self.on_stage: Callable[[], None] = lambda: None
        self.on_commit: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control, name)

    async def stage(self, manifest: Manifest, *, timeout: float) -> Any:
        self.on_stage()
        return await self._control.stage(manifest, timeout=timeout)

    async def commit(self, **how: Any) -> CommitReceipt:
        self.on_commit()
        return await self._control.commit(**how)


class _AnyVersion(CutDialect):
    """vLLM before 0.32 does not tell which version wrote a token. Here the answers' lengths count, not that."""

    def read(self, body: GenerateBody, content: bytes) -> Segment:
        self._epoch.posted[body.rid] = (self._epoch.commits, self._epoch.version)
        return super().read(body, content)


@dataclass(slots=True, kw_only=True)
class Line:
    """One trainer's way to one or more servers."""

    policy: Policy
    kind: TransportKind
    mode: InterruptMode
    channel: WeightChannel
    pool: ServerPool
    engine: RemoteEngine
    watched: dict[str, Watched] = field(default_factory=dict)
    last: ModelResponse | None = None

    async def add(self, server: Server, version: str = "") -> None:
        """Let a running server join."""
        backend = get_backend(server.engine)
        found = version or await backend.version(server.url, token=TOKEN, timeout=30)
        link = backend.connect(server.name, server.url, LinkSettings(token=TOKEN, version=found, transport=self.kind))
        watched = self.watched[server.name] = Watched(link.control)
        dialect = link.dialect
        if isinstance(dialect, CutDialect):
            dialect = _AnyVersion(dialect._epoch)
        await self.pool.add(server.name, server.url, watched, dialect)

    async def remove(self, server: Server) -> None:
        """Forget a server that is gone; its requests wait for another."""
        del self.watched[server.name]
        await self.pool.remove(server.name, "its process was killed")

    async def ask(self, tokens: int, seed: int = 0) -> ModelResponse:
        """One answer of exactly ``tokens`` tokens to a random prompt."""
        prompt = random.Random(seed).choices(range(3, self.policy.shape.vocabulary), k=PROMPT)
        settings = GenerationHyperparameters(max_new_tokens=tokens, ignore_eos=True)
        return await self.engine.agenerate(ModelRequest(input_ids=prompt, gconfig=settings))

    def apart(self, answer: ModelResponse) -> float:
        """Mean |log-prob - forward pass of the trainer's weights| over the answer's tokens."""
        expected = self.policy.logprobs(answer.input_tokens, answer.output_tokens)
        return fmean(abs(ours - theirs) for ours, theirs in zip(answer.output_logprobs, expected, strict=True))

    async def check(self) -> dict[str, Any]:
        """Ask for a fresh answer and compare it with the trainer's weights."""
        self.last = await self.ask(CHECKED, seed=time.time_ns())
        apart = self.apart(self.last)
        return {"apart": apart, "right": apart < MOST_APART}

    async def publish(self, version: int) -> dict[str, Any]:
        """Publish what the policy holds: what it took, in seconds, and how many requests were in flight."""
        exported = self.channel.statistics().seconds_exported
        began = time.perf_counter()
        receipts = await self.channel.publish(version)
        return {
            "version": version,
            "exported": self.channel.statistics().seconds_exported - exported,
            "staged": max(receipt.seconds_staged for receipt in receipts),
            "paused": max(receipt.seconds_paused for receipt in receipts),
            "paused_for": dict(max(receipts, key=lambda receipt: receipt.seconds_paused).seconds_by_part),
            "whole": time.perf_counter() - began,
            "bytes": receipts[0].bytes,
            "interrupted": sum(receipt.interrupted_requests for receipt in receipts),
        }

    async def update(self, version: int) -> dict[str, Any]:
        """Publish new weights, and see whether the server has them.

        ``apart`` is the distance of a fresh answer to the new weights, ``apart_before`` that of an answer of the
        version before: the first must be small, the second is what a server that was not updated would show.
        """
        await asyncio.to_thread(self.policy.renew, version)
        before = None if self.last is None else self.apart(self.last)
        row = await self.publish(version)
        return row | {"apart_before": before, **await self.check()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How updates travel. ``group``: gloo or nccl, for collective; ``bucket_bytes``: None is the transport's own."""

    kind: TransportKind
    mode: InterruptMode = InterruptMode.KEEP
    group: str = "gloo"
    bucket_bytes: int | None = None
    incarnation: int = 0
    timeout: float = 120.0


@asynccontextmanager
async def open_line(policy: Policy, way: Way, folder: Path) -> AsyncIterator[Line]:
    """A channel without servers; its writer's memory and files are gone afterwards."""
    run_id = f"sync-{secrets.token_hex(4)}"
    if policy.device.type == "cuda":
        torch.cuda.set_device(policy.device)
    async with AsyncExitStack() as stack:
        stack.callback(remove_segments, run_id)
        writer = make_writer(
            way.kind,
            run_id=run_id,
            directory=folder / run_id,
            bucket_bytes=way.bucket_bytes,
            group=way.group,
        )
        stack.callback(writer.close)
        # an engine under 256 answers may be slow to answer: these servers are not judged by it
        pool = await stack.enter_async_context(ServerPool(HealthPolicy(timeout=60.0)))
        engine = await stack.enter_async_context(RemoteEngine(pool, token=TOKEN))
        channel = WeightChannel(
            Exporter(writer=writer, policy=policy),
            pool,
            incarnation=way.incarnation,
            interrupt=way.mode,
            timeout=way.timeout,
        )
        yield Line(policy=policy, kind=way.kind, mode=way.mode, channel=channel, pool=pool, engine=engine)


class Load:
    """Answers that are being written all the time; every one must come back whole."""

    def __init__(self, line: Line, count: int, tokens: int) -> None:
        self._line, self._count, self._tokens = line, count, tokens
        self._over = False
        self._writers: list[asyncio.Task[None]] = []
        self._finished, self._written, self._cut, self._mixed = 0, 0, 0, 0
        self._wrong: list[str] = []

    async def start(self, timeout: float = 60.0) -> int:
        """Begin, and wait until the servers have them all; the number they have."""
        self._writers = [asyncio.create_task(self._write(i), name=f"write-{i}") for i in range(self._count)]
        deadline, running = time.monotonic() + timeout, 0
        while running < self._count and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK)
            health = [await watched.health(timeout=30.0) for watched in self._line.watched.values()]
            running = sum(answer.in_flight + answer.queued for answer in health)
        return running

    async def stop(self, timeout: float = 120.0) -> dict[str, Any]:
        """Let what is being written end; what came of all. ``whole`` is true if every answer had its length."""
        self._over = True
        _, late = await asyncio.wait(self._writers, timeout=timeout) if self._writers else (set(), set())
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        return {
            "answers": self._finished,
            "tokens": self._written,
            "cut_and_resumed": self._cut,
            "of_several_versions": self._mixed,
            "late": len(late),
            "wrong": self._wrong[:5],
            "whole": not late and not self._wrong and self._finished >= self._count,
        }

    async def _write(self, place: int) -> None:
        seed = place
        while not self._over:
            try:
                answer = await self._line.ask(self._tokens, seed=seed)
            except Exception as error:  # whatever it is: it is what the reading is about
                self._wrong.append(f"{type(error).__name__}: {error}"[:300])
                return
            if answer.output_len != self._tokens or answer.stop_reason is not StopReason.LENGTH:
                self._wrong.append(f"{answer.output_len} tokens, {answer.stop_reason}")
            self._finished += 1
            self._written += answer.output_len
            self._cut += answer.interruptions
            self._mixed += len(set(answer.output_versions)) > 1
            seed += self._count
