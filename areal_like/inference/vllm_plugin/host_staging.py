"""Fetching a version through host memory: read, verified and copied to the GPU tensor by tensor, by several threads.

    reader (one tensor per thread; a stream: one thread at a time, in order) --> verify --> copy beside --> StagedCopy

A CPU worker has one thread and neither locked pages nor copies beside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch

from areal_like.api.weights import Manifest, TensorEntry
from areal_like.errors import WeightUpdateError
from areal_like.inference.vllm_plugin.arena import SLICE_BYTES, Arena
from areal_like.inference.vllm_plugin.device_memory import DeviceMemory
from areal_like.inference.vllm_plugin.staged_copy import Beside, StagedCopy
from areal_like.weights.digest import tensor_digest
from areal_like.weights.transports.base import WeightReader, make_reader

_T = TypeVar("_T")


class HostStaging:
    """One worker's. What it keeps over versions is the arena."""

    def __init__(
        self,
        memory: DeviceMemory | None = None,
        *,
        threads: int = 1,
        held_back: frozenset[str] = frozenset(),
        slice_bytes: int = SLICE_BYTES,
    ) -> None:
        """``memory``: of the worker's GPU, if it has one. ``held_back``: tensors that nobody will load."""
        self._memory, self._threads, self._held_back = memory, threads, held_back
        self._arena = Arena(memory, slice_bytes=slice_bytes) if memory is not None else None

    def fetch(self, manifest: Manifest, over: Callable[[], bool]) -> StagedCopy:
        """Every tensor, verified; fewer where it is ``over``, which is asked before each. Blocks.

        Raises:
            WeightUpdateError: one is damaged, or the source is gone. Nothing is kept then.
        """
        copy = StagedCopy()
        try:
            with make_reader(manifest) as reader:
                copy = self._opened(manifest, over)
                apart = reader.concurrent and self._threads > 1
                tasks = _apart(manifest, copy) if apart else _in_order(reader, manifest, copy)

                def finish(task: tuple[TensorEntry, torch.Tensor]) -> None:
                    if apart:
                        reader.read_into(*task)
                    _verify(*task)
                    copy.add(*task)

                _Crew(tasks, finish, over).run(self._threads)
                copy.complete(manifest.tensors)
        except BaseException:
            copy.release()
            raise
        return copy

    def close(self) -> None:
        """Unlock the pages, now or when what is staged is released."""
        if self._arena is not None:
            self._arena.close()

    def _opened(self, manifest: Manifest, over: Callable[[], bool]) -> StagedCopy:
        if self._arena is None or self._memory is None or over():
            return StagedCopy()
        lease = self._arena.lease(manifest.tensors, over)
        wanted = [entry for entry in manifest.tensors if entry.name not in self._held_back]
        try:
            return StagedCopy(lease, Beside(self._memory, wanted))
        except BaseException:
            if lease is not None:
                lease.release()
            raise


def _apart(manifest: Manifest, copy: StagedCopy) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
    """Each tensor's place, to be read into. Large ones first: then threads end together."""
    for entry in sorted(manifest.tensors, key=lambda entry: -entry.nbytes):
        yield entry, copy.target(entry)


def _in_order(reader: WeightReader, manifest: Manifest, copy: StagedCopy) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
    """Each tensor, read already."""
    for entry in manifest.tensors:
        target = copy.target(entry)
        reader.read_into(entry, target)
        yield entry, target


def _verify(entry: TensorEntry, target: torch.Tensor) -> None:
    found = tensor_digest(target)
    if found != entry.digest:
        raise WeightUpdateError(
            f"tensor {entry.name!r}: its bytes have digest {found}, the manifest says {entry.digest}; "
            "they were damaged or overwritten on the way"
        )


class _Crew(Generic[_T]):
    """Threads that take ``tasks``, one thread at a time, and do each; after the first error, none is taken any more."""

    def __init__(self, tasks: Iterator[_T], do: Callable[[_T], None], over: Callable[[], bool]) -> None:
        self._tasks, self._do, self._over = tasks, do, over
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []

    def run(self, threads: int) -> None:
        """By this thread and ``threads - 1`` others, which have ended when it returns. Raises the first error."""
        others: list[threading.Thread] = []
        try:
            for number in range(1, threads):
                other = threading.Thread(target=self._work, name=f"stage-weights-{number}", daemon=True)
                other.start()
                others.append(other)
            self._work()
        except BaseException as error:  # raised below, when nobody works on any more
            self._errors.append(error)
        for other in others:
            other.join()
        try:
            if self._errors:
                raise self._errors[0]
        finally:
            self._errors.clear()  # they hold the tensors that were at work, and lead back here

    def _work(self) -> None:
        try:
            while (task := self._next()) is not None:
                self._do(task)
        except BaseException as error:  # of whatever kind: the thread that called run raises it
            self._errors.append(error)

    def _next(self) -> _T | None:
        with self._lock:
            return None if self._errors or self._over() else next(self._tasks, None)
