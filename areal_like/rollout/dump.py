"""What the model wrote, for people to read: ``rollouts/<version>.jsonl``, one line per trajectory of the batch."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from areal_like.api.trajectory import Batch, GroupTag, IntArray, Trajectory
from areal_like.api.workflow import Tokenizer

_LOG = logging.getLogger(__name__)
#: batches that may wait to be written; a disk slower than training costs lines, never memory or time
_WAITING = 2
#: seconds in which the last batches must reach the disk at the end
_CLOSE_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpStatistics:
    """Batches: ``written``, ``dropped`` because the disk was slow, ``failed`` with an error; and ``lines`` in all."""

    written: int
    dropped: int
    failed: int
    lines: int


class RolloutDump:
    """Writes batches from a thread, so that the event loop only hands them over.

    Use as ``async with RolloutDump(run_dir / "rollouts", tokenizer) as dump``; leaving it writes what waits. Of each
    batch the first ``max_rows`` trajectories are written.
    """

    def __init__(self, directory: Path, tokenizer: Tokenizer, *, max_rows: int = 1024) -> None:
        self._directory = directory
        self._tokenizer = tokenizer
        self._max_rows = max_rows
        self._queue: asyncio.Queue[tuple[Batch, Sequence[Trajectory]] | None] = asyncio.Queue(_WAITING)
        self._written = self._dropped = self._failed = self._lines = 0
        self._writer: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._writer = asyncio.create_task(self._write_all(), name="rollout dump")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await self._queue.put(None)
                await writer
        except TimeoutError:
            _LOG.warning("rollout dump: the last batches were not written within %g s", _CLOSE_TIMEOUT)
        finally:
            writer.cancel()

    def submit(self, batch: Batch, trajectories: Sequence[Trajectory]) -> None:
        """Hand over a batch with the trajectories of its tags, in their order. Returns at once."""
        try:
            self._queue.put_nowait((batch, trajectories))
        except asyncio.QueueFull:
            self._dropped += 1

    def statistics(self) -> DumpStatistics:
        return DumpStatistics(written=self._written, dropped=self._dropped, failed=self._failed, lines=self._lines)

    async def _write_all(self) -> None:
        """Consumes batches until the one that says the end."""
        while (waiting := await self._queue.get()) is not None:
            try:
                self._lines += await asyncio.to_thread(self._write, *waiting)
                self._written += 1
            except (OSError, ValueError) as error:  # reading matter for people is not worth a run
                self._failed += 1
                _LOG.warning("rollout dump of version %d: %s", waiting[0].version, error)

    def _write(self, batch: Batch, trajectories: Sequence[Trajectory]) -> int:
        """Runs on a thread. Written aside and renamed: a file is complete or absent."""
        owners = [group for group in batch.groups for _ in group.trajectories]
        rows = list(zip(owners, trajectories, strict=True))[: self._max_rows]
        file = self._directory / f"{batch.version}.jsonl"
        aside = file.with_suffix(".part")
        with aside.open("w", encoding="utf-8") as out:
            out.writelines(f"{json.dumps(self._line(batch, *row), ensure_ascii=False)}\n" for row in rows)
        aside.replace(file)
        return len(rows)

    def _line(self, batch: Batch, group: GroupTag, row: Trajectory) -> dict[str, Any]:
        ids = row.token_ids.tolist()
        first = int(np.argmax(row.loss_mask))
        spans = version_spans(row.versions)
        return {
            "version": batch.version,
            "group_id": group.group_id,
            "episode_id": row.episode_id,
            "epoch": group.prompt.epoch,
            "index": group.prompt.index,
            "attempt": group.attempt,
            "reward": row.reward,
            "lag": batch.version - min(version for version, _, _ in spans),
            "length": row.length,
            "loss_tokens": int(row.loss_mask.sum()),
            "prompt": self._tokenizer.decode(ids[:first]),
            "text": self._tokenizer.decode(ids[first:]),
            "token_versions": spans,
        }


def version_spans(versions: IntArray) -> list[tuple[int, int, int]]:
    """Runs of written tokens under one version, as (version, start, end): positions [start, end) of the row."""
    if versions.shape[0] == 0:
        return []
    starts = np.concatenate([[0], np.flatnonzero(np.diff(versions)) + 1])
    ends = np.append(starts[1:], versions.shape[0])
    runs = zip(versions[starts].tolist(), starts.tolist(), ends.tolist(), strict=True)
    return [run for run in runs if run[0] >= 0]
