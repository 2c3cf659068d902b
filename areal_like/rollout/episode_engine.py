"""The engine as one episode sees it: its seed, group and conversation are bound, its first request is reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from areal_like.api.engine import InferenceEngine
from areal_like.api.generation import ModelRequest, ModelResponse
from areal_like.rollout.cursor import PromptVisit
from areal_like.rollout.seeds import mix64

#: keeps sampling seeds apart from the other uses of the run seed
_SAMPLING = 0x5EED_70CE


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeIdentity:
    """Which episode this is. ``sibling`` counts 0..n_samples-1; ``retry`` counts failed tries of this sibling."""

    visit: PromptVisit
    sibling: int
    retry: int = 0

    @property
    def group_id(self) -> str:
        return self.visit.group_id

    @property
    def episode_id(self) -> str:
        return f"{self.visit.group_id}-s{self.sibling}-r{self.retry}"

    def seed(self, run_seed: int, request: int) -> int:
        """64-bit sampling seed of the episode's request number ``request``: a pure function of all of these."""
        prompt = self.visit.prompt
        return mix64(
            run_seed, _SAMPLING, prompt.epoch, prompt.index, self.visit.attempt, self.sibling, self.retry, request
        )


class EpisodeEngine:
    """Implements :class:`~areal_like.api.engine.InferenceEngine` for one episode.

    Args:
        engine: what really generates.
        identity: the episode.
        run_seed: the run's seed.
        on_dispatch: called before each request leaves; the first call of a group stamps it.
        on_tokens: called with the number of tokens of each answer.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        *,
        identity: EpisodeIdentity,
        run_seed: int,
        on_dispatch: Callable[[], object],
        on_tokens: Callable[[int], None],
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._run_seed = run_seed
        self._on_dispatch = on_dispatch
        self._on_tokens = on_tokens
        self._requests = 0

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Generate one answer; what the workflow set itself (rid, session, group, seed) is kept."""
        number, identity = self._requests, self._identity
        self._requests += 1
        bound = replace(
            request,
            # a private copy: multi-turn workflows go on appending to the list they passed
            input_ids=tuple(request.input_ids),
            rid=request.rid or f"{identity.episode_id}-q{number}",
            session_id=request.session_id if request.session_id is not None else identity.episode_id,
            group_id=request.group_id if request.group_id is not None else identity.group_id,
            seed=request.seed if request.seed is not None else identity.seed(self._run_seed, number),
        )
        self._on_dispatch()
        response = await self._engine.agenerate(bound)
        self._on_tokens(response.output_len)
        return response

    def get_version(self) -> int:
        return self._engine.get_version()
