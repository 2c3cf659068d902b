"""The decode loop's one step: let prompts join, write one token of every running answer, let finished ones leave.

    waiting ──join──> prefill ──first token──> row 0..R-1 ──decode──> finished
                          └─ ended by its first token: never gets a row ─┘

Runs in one thread; nothing here locks, waits or knows of HTTP. Whoever calls :meth:`DecodeLoop.step` names the weight
version that the step's tokens are written under.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from areal_like.inference.embedded.kv_cache import CapturedPrompt, SlotCache
from areal_like.inference.embedded.model import ModelRunner
from areal_like.inference.embedded.requests import Answer, Request
from areal_like.inference.embedded.rows import RowTable, logit_changes
from areal_like.inference.embedded.sampling import Drawn, draw
from areal_like.inference.embedded.slots import PREFILL_AREA, CacheShape, moves_to_close, plan_prefill


@dataclass(slots=True, kw_only=True)
class LoopCounters:
    """Totals since the server started."""

    generated_tokens: int = 0
    prompt_tokens: int = 0
    prefills: int = 0
    decode_steps: int = 0
    decode_rows: int = 0
    recomputed_tokens: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0
    broken_requests: int = 0


class DecodeLoop:
    """Waiting answers, running rows and their cache."""

    def __init__(self, runner: ModelRunner, shape: CacheShape, *, now: Callable[[], float] = time.monotonic) -> None:
        self.counters = LoopCounters()
        self.cache = SlotCache()
        self._runner = runner
        self._shape = shape
        self._now = now
        self._waiting: deque[Answer] = deque()
        self._rows: list[Answer | None] = []
        self._table = RowTable(shape.max_rows)
        self._finished: list[Request] = []
        self._running = 0
        self._queued = 0

    # --- what the engine asks -----------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests that have a token and have not ended. An int, so safe to read from any thread."""
        return self._running

    @property
    def queued(self) -> int:
        """Requests that have no token yet."""
        return self._queued

    @property
    def has_rows(self) -> bool:
        return any(answer is not None for answer in self._rows)

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def requests(self) -> list[Request]:
        """Every request that has not ended."""
        answers = (*(a for a in self._rows if a is not None), *self._waiting)
        return list({id(a.request): a.request for a in answers}.values())

    def enqueue(self, request: Request) -> None:
        self._waiting.extend(request.answers)
        self._queued += 1

    def take_finished(self) -> list[Request]:
        """Requests that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def step(self, version: int, *, admit: bool) -> None:
        """One round: one token for every running answer, and the first for those that join (if ``admit``).

        In this order every answer gets one token a round, so that a commit between two rounds may fall between any two
        tokens; and who joins finds the slots of those that have just ended.
        """
        with torch.inference_mode():
            if self._rows:
                self._decode(version)
            if admit and self._waiting:
                self._join(version)

    def abort(self, chosen: Callable[[Request], bool]) -> int:
        """End the ``chosen`` requests with what they have; their number."""
        aborted = [r for r in self.requests if chosen(r)]
        for request in aborted:
            self._remove(request)
        self.counters.aborted_requests += len(aborted)
        return len(aborted)

    def recompute(self) -> None:
        """Compute the keys and values of every running answer again, under the weights as they are now."""
        rows = [(row, answer.cached_ids) for row, answer in enumerate(self._rows) if answer is not None]
        with torch.inference_mode():
            for group in plan_prefill([len(ids) for _, ids in rows]):
                _, captured = self._runner.prefill([rows[i][1] for i in group])
                self.cache.insert(captured, range(len(group)), [rows[i][0] for i in group])
                self.counters.recomputed_tokens += sum(captured.lengths)

    # --- joining ------------------------------------------------------------------------------------------------

    def _join(self, version: int) -> None:
        joining = self._take_joining()
        prompts = list({a.request.prompt: None for a in joining})
        by_prompt: dict[tuple[int, ...], list[Answer]] = {p: [] for p in prompts}
        for answer in joining:
            by_prompt[answer.request.prompt].append(answer)
        for group in plan_prefill([len(p) for p in prompts]):
            # equal prompts, siblings above all, share one row of the prefill: same forward, same weights
            sources = [i for i, index in enumerate(group) for _ in by_prompt[prompts[index]]]
            answers = [a for index in group for a in by_prompt[prompts[index]]]
            self._prefill([prompts[index] for index in group], answers, sources, version)

    def _take_joining(self) -> list[Answer]:
        """Answers that join now, oldest first: as many as have rows, cache and a bounded prefill."""
        joining: list[Answer] = []
        rows = sum(a is not None for a in self._rows)
        columns = max((a.longest for a in self._rows if a is not None), default=0)
        area = 0
        seen: set[tuple[int, ...]] = set()
        while self._waiting:
            answer = self._waiting[0]
            prompt = answer.request.prompt
            if joining and prompt not in seen and area + len(prompt) > PREFILL_AREA:
                break
            if answer.bounds.budget > 1:
                columns = max(columns, answer.longest)
                if rows >= self._shape.max_rows or not self._shape.fits(rows + 1, columns):
                    break
                rows += 1
            if prompt not in seen:
                seen.add(prompt)
                area += len(prompt)
            joining.append(self._waiting.popleft())
        return joining

    def _prefill(
        self, prompts: Sequence[tuple[int, ...]], answers: list[Answer], sources: list[int], version: int
    ) -> None:
        logits, captured = self._runner.prefill(prompts)
        if len(answers) > len(prompts):
            logits = logits[torch.tensor(sources, device=logits.device)]
        drawn = draw(logits, RowTable.of(answers).columns(), logit_changes(answers))
        now = self._now()
        for request in {answer.request for answer in answers}:
            self._start(request, now)
        self.counters.prefills += 1
        self.counters.prompt_tokens += sum(captured.lengths)
        ended = self._write(answers, drawn, version)
        staying = [i for i, answer in enumerate(answers) if i not in ended and not answer.request.error]
        if staying:
            self._seat([answers[i] for i in staying], [sources[i] for i in staying], captured)

    def _seat(self, answers: list[Answer], sources: list[int], captured: CapturedPrompt) -> None:
        """Give ``answers`` rows, holes first, and copy their prompts there."""
        if not self.has_rows:
            self._rows.clear()
        live_rows = len(self._rows)
        holes = [row for row, answer in enumerate(self._rows) if answer is None][: len(answers)]
        rows = [*holes, *range(live_rows, live_rows + len(answers) - len(holes))]
        self._rows.extend([None] * (len(answers) - len(holes)))
        for row, answer in zip(rows, answers, strict=True):
            self._rows[row] = answer
            self._table.put(row, answer)
        self.cache.adopt(captured)
        self._reserve(live_rows, self._table.longest(len(self._rows)))
        self.cache.insert(captured, sources, rows)

    def _reserve(self, live_rows: int, columns: int) -> None:
        self.cache.reserve(live_rows=live_rows, rows=len(self._rows), columns=columns, max_rows=self._shape.max_rows)

    # --- decoding -----------------------------------------------------------------------------------------------

    def _decode(self, version: int) -> None:
        self._close_holes()
        if not self._rows:
            return
        count = len(self._rows)
        answers = [a for a in self._rows if a is not None]
        longest = self._table.longest(count)
        self._reserve(count, longest)
        device = self._runner.device
        tokens = torch.from_numpy(self._table.token[:count]).to(device, non_blocking=True)
        positions = torch.from_numpy(self._table.length[:count]).to(device, non_blocking=True)
        logits = self._runner.decode(tokens, positions, longest, self.cache)
        changes = logit_changes(answers) if self._table.changing(count) else ()
        drawn = draw(logits, self._table.columns(count), changes)
        self._table.advance(count, drawn.tokens)
        self.counters.decode_steps += 1
        self.counters.decode_rows += count
        for row in self._write(answers, drawn, version):
            self._rows[row] = None

    def _close_holes(self) -> None:
        holes = [row for row, answer in enumerate(self._rows) if answer is None]
        if not holes:
            return
        count = len(self._rows)
        moves = moves_to_close(count, holes)
        if moves:
            self.cache.move(moves, self._table.longest(count))
            self._table.move(moves)
            for source, target in moves:
                self._rows[target] = self._rows[source]
        del self._rows[count - len(holes) :]

    def _write(self, answers: Sequence[Answer], drawn: Drawn, version: int) -> set[int]:
        """Append one token to each answer; the indices of those that ended."""
        ended: set[int] = set()
        tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
        for index, answer in enumerate(answers):
            if answer.write(tokens[index], logprobs[index], version):
                ended.add(index)
        self.counters.generated_tokens += len(answers)
        if not np.isfinite(drawn.logprobs).all():
            for index in np.flatnonzero(~np.isfinite(drawn.logprobs)).tolist():
                self._break(answers[index].request, version)
        for index in ended:
            self._leave(answers[index].request)
        return ended

    # --- leaving ------------------------------------------------------------------------------------------------

    def _start(self, request: Request, now: float) -> None:
        if request.first_token is None:
            request.first_token = now
            self._queued -= 1
            self._running += 1

    def _end(self, request: Request) -> None:
        request.finished = self._now()
        if request.started:
            self._running -= 1
        else:
            self._queued -= 1
        self._finished.append(request)

    def _leave(self, request: Request) -> None:
        """One answer of ``request`` has ended by itself."""
        request.unfinished -= 1
        if request.unfinished == 0 and not request.error:
            self.counters.finished_requests += 1
            self._end(request)

    def _remove(self, request: Request) -> None:
        """End ``request`` now; answers that had not ended stay without a stop reason."""
        rows = [row for row, answer in enumerate(self._rows) if answer is not None and answer.request is request]
        for row in rows:
            self._rows[row] = None
        if rows and request.error:
            self.cache.clear(rows)
        self._waiting = deque(a for a in self._waiting if a.request is not request)
        self._end(request)

    def _break(self, request: Request, version: int) -> None:
        """The weights gave this request a distribution with NaN: it fails, the others go on."""
        if request.error:
            return
        request.error = f"the weights of version {version} gave logits that are not finite for request {request.rid!r}"
        self.counters.broken_requests += 1
        self._remove(request)
