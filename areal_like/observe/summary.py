"""``summary.json``: what a run came to, in one record."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from areal_like.errors import ConfigError
from areal_like.observe.disk import writing
from areal_like.observe.figures import tidy


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounts:
    """How many groups left the pipeline in which way."""

    trained: int = 0
    filtered: int = 0
    failed: int = 0
    stale: int = 0
    cancelled: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of one run. Rewards and evaluation scores are None where there were none.

    Attributes:
        seconds: from the start of the run to its end.
        steps: steps of the loop that were finished.
        reward_first, reward_last: mean episode reward of the first and of the last batch.
        eval_before, eval_after: mean evaluation reward of the first and of the last version evaluated.
        lag_max, lag_mean: over every group trained.
        interrupted_requests: requests in flight at a commit.
        multi_version_trajectories: trained trajectories whose tokens were written by more than one version.
        pause_seconds_total: seconds servers stood still for a commit, summed over servers and publications.
        weight_bytes_total: bytes that servers received.
        extra: whatever else is worth keeping, by name.
    """

    seconds: float
    steps: int
    reward_first: float | None
    reward_last: float | None
    eval_before: float | None
    eval_after: float | None
    versions_published: int
    lag_max: int
    lag_mean: float
    groups: GroupCounts
    generated_tokens: int
    trained_tokens: int
    interrupted_requests: int
    multi_version_trajectories: int
    pause_seconds_total: float
    weight_bytes_total: int
    extra: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; ``extra`` is spread beside the named figures."""
        figures = asdict(self)
        extra = figures.pop("extra")
        return tidy({**extra, **figures})  # type: ignore[no-any-return]

    def write(self, path: Path) -> None:
        """Write the file at once and whole: a reader sees the old one or the new one.

        Raises:
            ArealLikeError: the disk is full or gone.
        """
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        with writing(path):
            try:
                aside.write_text(text, encoding="utf-8")
                aside.replace(path)
            except OSError:
                with suppress(OSError):
                    aside.unlink(missing_ok=True)
                raise


def read_summary(path: Path) -> Summary:
    """What :meth:`Summary.write` wrote.

    Raises:
        ConfigError: the file is missing, or no summary.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        figures = {name: found.pop(name) for name in Summary.__dataclass_fields__ if name != "extra"}
        return Summary(**figures | {"groups": GroupCounts(**figures["groups"])}, extra=found)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: is no summary that a run wrote: {error}") from None


class RunTally:
    """Adds up the figures of a run as they occur; :meth:`summary` may be asked for at any time."""

    def __init__(self) -> None:
        self._steps = 0
        self._rewards: list[float] = []
        self._evaluations: list[float] = []
        self._lag_sum = 0
        self._lag_max = 0
        self._lag_groups = 0
        self._multi_version = 0
        self._trained_tokens = 0
        self._publications = 0
        self._interrupted = 0
        self._pause_seconds = 0.0
        self._weight_bytes = 0

    def taken(self, *, lags: Sequence[int], multi_version_trajectories: int) -> None:
        """A batch was taken: the lag of each of its groups, and how many trajectories hold several versions."""
        self._lag_sum += sum(lags)
        self._lag_groups += len(lags)
        self._lag_max = max([self._lag_max, *lags])
        self._multi_version += multi_version_trajectories

    def trained(self, *, reward: float | None, tokens: int) -> None:
        """A step was finished: its batch's mean episode reward, and the tokens that had a loss."""
        self._steps += 1
        self._trained_tokens += tokens
        if reward is not None:
            self._rewards = [*self._rewards[:1], reward]

    def published(self, *, pause_seconds: float, interrupted_requests: int, weight_bytes: int) -> None:
        """A version was published: sums over the servers that acknowledged it."""
        self._publications += 1
        self._pause_seconds += pause_seconds
        self._interrupted += interrupted_requests
        self._weight_bytes += weight_bytes

    def evaluated(self, reward: float) -> None:
        """A version was evaluated. The first and the last are kept."""
        self._evaluations = [*self._evaluations[:1], reward]

    def summary(
        self, *, seconds: float, groups: GroupCounts, generated_tokens: int, extra: dict[str, Any] | None = None
    ) -> Summary:
        return Summary(
            seconds=seconds,
            steps=self._steps,
            reward_first=self._rewards[0] if self._rewards else None,
            reward_last=self._rewards[-1] if self._rewards else None,
            eval_before=self._evaluations[0] if self._evaluations else None,
            eval_after=self._evaluations[-1] if len(self._evaluations) > 1 else None,
            versions_published=self._publications,
            lag_max=self._lag_max,
            lag_mean=self._lag_sum / self._lag_groups if self._lag_groups else 0.0,
            groups=groups,
            generated_tokens=generated_tokens,
            trained_tokens=self._trained_tokens,
            interrupted_requests=self._interrupted,
            multi_version_trajectories=self._multi_version,
            pause_seconds_total=self._pause_seconds,
            weight_bytes_total=self._weight_bytes,
            extra=extra or {},
        )
