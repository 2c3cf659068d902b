"""Tensors on their way out through host memory: copied by one thread, hashed and written by several.

    the caller's thread   takes a tensor from the exporter, copies it into blocks of host memory, takes the next
    the other threads     hash the copies; place those that are hashed, in the exporter's order; write what is placed

Only the caller's thread touches the exporter, which may run collectives, and each copy is whole before the exporter is
asked for the next tensor, whose memory may be the same. Places depend on content (what is there already is not written
twice), so they are given in order, as digests become known. With one thread, all of it happens in the caller's, and
a tensor that lies on the CPU is read where it lies.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import torch

from areal_like.api.weights import TensorEntry
from areal_like.errors import WeightUpdateError
from areal_like.weights.digest import dtype_name
from areal_like.weights.host_blocks import BLOCK_BYTES, BlockStatistics, HostBlocks, Part
from areal_like.weights.manifest import ContentDigest
from areal_like.weights.parallel import host_threads

#: bytes in flight for each thread: a large matrix in its hands and one to come...
_BUDGET_PER_THREAD = 256 * 2**20
#: ...and in all
_MOST_BUDGET = 2 * 2**30
#: what a medium wants done, in any thread; no job waits for another
Job = Callable[[], None]


class HostCopy:
    """A tensor's bytes in host memory, in order; ``digest`` is empty until they are hashed."""

    def __init__(self, name: str, tensor: torch.Tensor, parts: tuple[Part, ...]) -> None:
        self.name = name
        self.parts = parts
        self.digest = ""
        self._dtype = dtype_name(tensor.dtype)
        self._shape = tuple(tensor.shape)
        self._nbytes = tensor.numel() * tensor.element_size()

    def hash(self) -> None:
        state = ContentDigest(self._dtype, self._shape)
        for part in self.parts:
            state.update(part.data)
        self.digest = state.hexdigest()

    @property
    def entry(self) -> TensorEntry:
        """The manifest's line."""
        return TensorEntry(
            name=self.name, dtype=self._dtype, shape=self._shape, nbytes=self._nbytes, digest=self.digest
        )

    def release(self) -> None:
        """Nobody needs the bytes."""
        for part in self.parts:
            part.release()


class Medium(Protocol):
    """Where copies go. Its methods are called by one thread at a time; its jobs release the parts that they wrote."""

    @property
    def collects(self) -> bool:
        """It may keep a copy beyond the jobs that ``place`` returned for it."""
        ...

    def place(self, copy: HostCopy, entry: TensorEntry) -> Iterable[Job]:
        """The next copy, hashed. What is there already is released at once."""
        ...

    def finish(self) -> Iterable[Job]:
        """There are no more."""
        ...


class HostCopies:
    """Owns the memory that exports go through, and lends it to one export at a time."""

    def __init__(
        self, *, threads: int | None = None, budget: int | None = None, block_bytes: int = BLOCK_BYTES
    ) -> None:
        """``threads``: that hash and write; what the machine has to spare without. ``budget``: bytes in flight."""
        self._threads = threads or host_threads()
        self._changed = threading.Condition()
        most = budget or min(self._threads * _BUDGET_PER_THREAD, _MOST_BUDGET)
        self._blocks = HostBlocks(self._changed, budget=most, block_bytes=block_bytes)

    def export(self, tensors: Iterable[tuple[str, torch.Tensor]], medium: Medium) -> tuple[TensorEntry, ...]:
        """Bring every tensor to ``medium``; all of its jobs are done and all threads gone when this returns or raises.

        Raises:
            WeightUpdateError: the exporter brings a name twice.
            OSError: of a job; what the exporter raises passes through as well.
        """
        crew = _Crew(self._changed)
        try:
            if self._threads > 1:
                crew.hire(self._threads)
            flight = _Flight(medium, self._blocks, self._changed, crew)
            for name, tensor in tensors:
                flight.take(name, tensor)
            return flight.land()
        finally:
            try:
                crew.stop()
            finally:
                self._blocks.reset()

    def statistics(self) -> BlockStatistics:
        return self._blocks.statistics()

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._blocks.close()


class _Crew:
    """Threads that do jobs; before any are hired, whoever brings a job does it. ``changed`` guards every state here."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._threads: list[threading.Thread] = []
        self._jobs: deque[Job] = deque()
        self._unfinished = 0
        self._working = 0
        self._stopped = False
        self._error: BaseException | None = None

    @property
    def alone(self) -> bool:
        return not self._threads

    def hire(self, count: int) -> None:
        for number in range(count):
            thread = threading.Thread(target=self._work, name=f"weights-export-{number}")
            with self._changed:
                thread.start()
                self._working += 1
            self._threads.append(thread)

    def start(self, job: Job, *, soon: bool = False) -> None:
        """``soon``: before all others that have not begun."""
        if self.alone:
            job()
            return
        with self._changed:
            self._unfinished += 1
            if soon:
                self._jobs.appendleft(job)
            else:
                self._jobs.append(job)
            self._changed.notify_all()

    def idle(self) -> bool:
        """Nothing is left to do. To be called under ``changed``; raises the first error of a job."""
        if self._error is not None:
            raise self._error
        return not self._unfinished

    def stop(self) -> None:
        """Wait for the jobs that have begun; the others are dropped. All threads have ended afterwards.

        Ctrl-C is raised when they have: the caller may close then what they write into.
        """
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        interrupted: KeyboardInterrupt | None = None
        while self._working > 0:
            try:
                with self._changed:
                    self._changed.wait_for(lambda: self._working <= 0)
            except KeyboardInterrupt as again:
                interrupted = again
        for thread in self._threads:
            thread.join()  # not before: Python 3.11 takes a thread whose join was interrupted for one that has ended
        self._jobs.clear()  # they and the error hold memory, and lead back here: it would stay until it is looked for
        self._error = None
        if interrupted is not None:
            raise interrupted

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._do(job)
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def _do(self, job: Job) -> None:
        try:
            job()
        except BaseException as error:  # whatever it is, the caller's thread raises it
            with self._changed:
                self._error = self._error or error
                self._stopped = True
        finally:
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._stopped)
            return None if self._stopped else self._jobs.popleft()


class _Flight:
    """One export. Under ``order`` copies get their places, one at a time."""

    def __init__(self, medium: Medium, blocks: HostBlocks, changed: threading.Condition, crew: _Crew) -> None:
        self._medium = medium
        self._blocks = blocks
        self._changed = changed
        self._crew = crew
        self._order = threading.Lock()
        self._names: set[str] = set()
        self._unplaced: deque[HostCopy] = deque()
        self._entries: list[TensorEntry] = []

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor and have it hashed."""
        if name in self._names:
            raise WeightUpdateError(f"tensor {name!r} is exported twice; every name must come once")
        self._names.add(name)
        with self._changed:
            self._crew.idle()  # what broke meanwhile ends the export here, not at its end
        copy = HostCopy(name, tensor, self._parts(tensor))
        with self._order:
            self._unplaced.append(copy)
        self._crew.start(partial(self._hash, copy))

    def _parts(self, tensor: torch.Tensor) -> tuple[Part, ...]:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if self._crew.alone and not self._medium.collects and flat.device.type == "cpu":
            return (Part(start=0, data=flat.numpy().data, release=lambda: None),)  # it is written before we return
        return self._blocks.copy(flat, self._crew.idle)

    def land(self) -> tuple[TensorEntry, ...]:
        """Wait until all is written."""
        self._wait()
        for job in self._medium.finish():
            self._crew.start(job)
        self._wait()
        return tuple(self._entries)

    def _hash(self, copy: HostCopy) -> None:
        copy.hash()
        with self._order:
            while self._unplaced and self._unplaced[0].digest:
                first = self._unplaced.popleft()
                entry = first.entry
                self._entries.append(entry)
                for job in self._medium.place(first, entry):
                    self._crew.start(job, soon=True)  # it frees memory

    def _wait(self) -> None:
        with self._changed:
            self._changed.wait_for(self._crew.idle)
