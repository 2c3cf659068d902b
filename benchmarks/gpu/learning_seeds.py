"""Learning runs over seeds: what result files of ``learning.py`` say of each η, method and learning rate.

A seed decides the order of the prompts, what is sampled and how minibatches are cut; model and data are the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

#: the part of a result file that has a run each, in the order in which later runs replace earlier ones
PARTS = ("timed", "side by side")
#: of a run whose name and figures tell none, as in results from before there were several
_ONLY_SEED = 1
#: training rewards are told of steps 11 to 20, where methods differ most, and of the last ten
_EARLY, _LAST = slice(10, 20), 10
_NAME = re.compile(r"eta=(?P<eta>\d+) (?P<method>.+?)(?:, seed (?P<seed>\d+))?")

Run = Mapping[str, Any]


def name_of(eta: int, method: str, seed: int | None = None) -> str:
    """``eta=2 decoupled``, and ``, seed 3`` where there are several."""
    return f"eta={eta} {method}" + ("" if seed is None else f", seed {seed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A figure over seeds."""

    by_seed: Mapping[int, float]

    @property
    def mean(self) -> float:
        return fmean(self.by_seed.values())

    @property
    def error(self) -> float | None:
        """Standard error of the mean: the deviation of the sample (n - 1) by √n; None of a single seed."""
        n = len(self.by_seed)
        return stdev(self.by_seed.values()) / math.sqrt(n) if n > 1 else None

    def less(self, other: Mean) -> Mean | None:
        """The difference, seed by seed, of the seeds that both have; None where they share none."""
        shared = {seed: value - other.by_seed[seed] for seed, value in self.by_seed.items() if seed in other.by_seed}
        return Mean(by_seed=shared) if shared else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OverSeeds:
    """All runs of one η, method and learning rate, by seed. ``replaced``: so many gave way to later ones of a seed."""

    eta: int
    method: str
    learning_rate: float | None
    runs: Mapping[int, Run] = field(default_factory=dict)
    replaced: int = 0

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(self.runs)

    @property
    def held_out(self) -> dict[int, Mean]:
        """By version, over the seeds that were evaluated there; of several evaluations of a version the last."""
        found: dict[int, dict[int, float]] = {}
        for seed, run in self.runs.items():
            for version, reward, *_ in run["held_out"]:
                if reward is not None:
                    found.setdefault(version, {})[seed] = reward
        return {version: Mean(by_seed=found[version]) for version in sorted(found)}

    @property
    def early(self) -> Mean | None:
        """Training reward of steps 11 to 20, of the runs that made them all."""
        return self._trained(_EARLY, lambda rewards: len(rewards) >= _EARLY.stop)

    @property
    def last(self) -> Mean | None:
        """Training reward of the last ten steps, of the runs that made as many steps as any here."""
        most = max(max(len(run["reward"]) for run in self.runs.values()), _LAST)
        return self._trained(slice(-_LAST, None), lambda rewards: len(rewards) == most)

    def smoothed(self, window: int) -> dict[int, Mean]:
        """Training reward by step, from 1: each seed's mean of ``window`` steps up to it, of the seeds that made it."""
        found: dict[int, dict[int, float]] = {}
        for seed, run in self.runs.items():
            for step in range(1, len(run["reward"]) + 1):
                found.setdefault(step, {})[seed] = fmean(run["reward"][max(0, step - window) : step])
        return {step: Mean(by_seed=found[step]) for step in sorted(found)}

    def _trained(self, steps: slice, counts: Callable[[Sequence[float]], bool]) -> Mean | None:
        found = {seed: fmean(run["reward"][steps]) for seed, run in self.runs.items() if counts(run["reward"])}
        return Mean(by_seed=found) if found else None


def over_seeds(*results: Mapping[str, Any]) -> list[OverSeeds]:
    """The runs of result files that made steps, by learning rate, η and method.

    A run's seed is told by its name, else by its figures, else it is 1. Of two runs that are alike in all of this the
    later one counts: of the later file, or side by side rather than timed.
    """
    found: dict[tuple[int, str, float | None], list[tuple[int, Run]]] = {}
    for eta, method, rate, seed, run in (told for result in results for told in _runs(result)):
        found.setdefault((eta, method, rate), []).append((seed, run))
    groups = []
    for (eta, method, rate), told in found.items():
        runs = dict(sorted(dict(told).items()))
        replaced = len(told) - len(runs)
        groups.append(OverSeeds(eta=eta, method=method, learning_rate=rate, runs=runs, replaced=replaced))
    return sorted(groups, key=lambda g: (-(g.learning_rate or 0.0), g.eta, g.method))


def _runs(result: Mapping[str, Any]) -> Iterator[tuple[int, str, float | None, int, Run]]:
    """(η, method, learning rate, seed, figures) of each run that made steps.

    The rate is the run's own, else its part's (``parts``: facts of each, where a file holds parts of several calls),
    else the file's.
    """
    for part in PARTS:
        facts = result.get("parts", {}).get(part, result)
        told = result.get(part)
        for name, run in told.items() if isinstance(told, dict) else ():
            if isinstance(run, dict) and "reward" in run and (words := _NAME.fullmatch(name)):
                rate = run.get("learning_rate", facts.get("learning_rate"))
                seed = int(words["seed"] or run.get("seed", _ONLY_SEED))
                yield int(words["eta"]), words["method"], rate, seed, run


# -- Markdown --


def tables(groups: Sequence[OverSeeds]) -> str:
    """Means over seeds ± their standard errors; where there are several, seed by seed; differences at equal seeds."""
    versions = sorted({version for group in groups for version in group.held_out})
    head = [*(f"held-out {version}" for version in versions), "training, steps 11 to 20", "last ten"]
    means = [[*_kind(g), ", ".join(map(str, g.seeds)), *_cells(g, versions, len(g.seeds))] for g in groups]
    each = [[*_kind(g), str(seed), *_of_seed(g, versions, seed)] for g in groups for seed in g.seeds]
    found = [
        "Means over seeds ± standard errors; (n): of n seeds only.",
        _table(["η", "objective", "lr", "seeds", *head], means),
    ]
    if len(each) > len(means):
        found += ["Seed by seed.", _table(["η", "objective", "lr", "seed", *head], each)]
    differences = list(_differences(groups, versions))
    if differences:
        found += ["Differences at equal seeds.", _table(["η", "objectives", "lr", "seeds", *head], differences)]
    replaced = [f"{name_of(g.eta, g.method)}, lr {g.learning_rate}: {g.replaced}" for g in groups if g.replaced]
    if replaced:
        found.append("Runs left out, since a later one has the same seed: " + "; ".join(replaced) + ".")
    return "\n\n".join(found)


def _kind(group: OverSeeds) -> list[str]:
    return [str(group.eta), group.method, "" if group.learning_rate is None else f"{group.learning_rate:g}"]


def _figures(group: OverSeeds, versions: Sequence[int]) -> list[Mean | None]:
    held_out = group.held_out
    return [*(held_out.get(version) for version in versions), group.early, group.last]


def _cells(group: OverSeeds, versions: Sequence[int], seeds: int) -> list[str]:
    return [_cell(figure, seeds) for figure in _figures(group, versions)]


def _of_seed(group: OverSeeds, versions: Sequence[int], seed: int) -> list[str]:
    return [
        "" if figure is None or seed not in figure.by_seed else _short(figure.by_seed[seed])
        for figure in _figures(group, versions)
    ]


def _differences(groups: Sequence[OverSeeds], versions: Sequence[int]) -> Iterator[list[str]]:
    """A row for every two methods of one η and learning rate that share seeds."""
    for place, first in enumerate(groups):
        for other in groups[place + 1 :]:
            shared = [seed for seed in first.seeds if seed in other.seeds]
            if shared and (first.eta, first.learning_rate) == (other.eta, other.learning_rate):
                pairs = zip(_figures(first, versions), _figures(other, versions), strict=True)
                less = [a.less(b) if a and b else None for a, b in pairs]
                eta, _, rate = _kind(first)
                cells = [_cell(figure, len(shared)) for figure in less]
                yield [eta, f"{first.method} less {other.method}", rate, ", ".join(map(str, shared)), *cells]


def _cell(figure: Mean | None, seeds: int) -> str:
    if figure is None:
        return ""
    error = "" if figure.error is None else f" ± {_short(figure.error)}"
    return _short(figure.mean) + error + ("" if len(figure.by_seed) == seeds else f" ({len(figure.by_seed)})")


def _short(value: float) -> str:
    """.718"""
    return re.sub(r"^(-?)0\.", r"\1.", f"{value:.3f}")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))
