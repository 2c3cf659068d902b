"""Off-policy figures against numpy over the flat tokens; parts merge exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_like.algo.objectives import get_objective
from areal_like.algo.offpolicy import LAG_BINS, OffPolicySums, empty, finalise, measure, merge
from areal_like.algo.settings import ObjectiveSettings
from areal_like.algo.terms import PolicyTerms

MakeTerms = Callable[..., PolicyTerms]
VERSION = 9


def versions(terms: PolicyTerms) -> torch.Tensor:
    version_T = VERSION - torch.arange(terms.mask_T.numel()) % 4
    version_T[terms.row_T == 0] = VERSION
    version_T[~terms.mask_T] = -1
    return version_T


def figures(terms: PolicyTerms, settings: ObjectiveSettings, version_T: torch.Tensor | None = None) -> OffPolicySums:
    return measure(
        terms,
        get_objective("decoupled_ppo")(terms, settings),
        entropy_T=torch.linspace(0, 1, terms.mask_T.numel(), dtype=torch.float64),
        version_T=versions(terms) if version_T is None else version_T,
        version=VERSION,
        behave_cap=settings.behave_cap,
    )


def test_figures_match_numpy(make_terms: MakeTerms) -> None:
    terms = make_terms(1, spread=0.8)
    settings = ObjectiveSettings(behave_cap=1.5, behave_mode="mask")
    got = finalise(figures(terms, settings), version=VERSION)

    mask = terms.mask_T.numpy()
    theta, prox, behave = (getattr(terms, f"{n}_T").detach().numpy()[mask] for n in ("theta", "prox", "behave"))
    w, r = np.exp(prox - behave), np.exp(theta - prox)
    lag = VERSION - versions(terms).numpy()[mask]
    row = terms.row_T.numpy()[mask]
    advantage = terms.advantage_T.numpy()[mask]
    row_w = np.array([np.exp((prox - behave)[row == i].sum()) for i in range(terms.rows)])
    gap = np.abs(prox - behave)[row == 0]
    clipped = ((advantage > 0) & (r > 1.2)) | ((advantage < 0) & (r < 0.8))
    want = {
        "tokens": mask.sum(),
        "ess": w.sum() ** 2 / (w.size * (w**2).sum()),
        "ess_sequence": row_w.sum() ** 2 / (row_w.size * (row_w**2).sum()),
        "weight_mean": w.mean(),
        "weight_max": w.max(),
        "kl_k1": (behave - prox).mean(),
        "kl_k3": (w - 1 - np.log(w)).mean(),
        "chi2": (w**2).mean() - 1,
        "update_kl_k1": (prox - theta).mean(),
        "update_kl_k3": (r - 1 - np.log(r)).mean(),
        "ratio_max": r.max(),
        "clipped_fraction": clipped.mean(),
        "dropped_fraction": (w > 1.5).mean(),
        "rejected_fraction": np.mean([(w > 1.5)[row == i].all() for i in range(terms.rows)]),
        "capped_fraction": (w > 1.5).mean(),
        "entropy": np.linspace(0, 1, mask.size)[mask].mean(),
        "perplexity_gap": np.exp(-prox.mean()) / np.exp(-behave.mean()) - 1,
        "lag_mean": lag.mean(),
        "lag_max": lag.max(),
        "logprob_gap_mean": gap.mean(),
        "logprob_gap_rms": np.sqrt((gap**2).mean()),
        "logprob_gap_max": gap.max(),
        "fresh_fraction": (row == 0).mean(),
    }
    want |= {f"lag_tokens_{i}": n for i, n in enumerate(np.bincount(lag)) if n}
    want |= {f"version_tokens_{VERSION - i}": n for i, n in enumerate(np.bincount(lag)) if n}
    assert set(got) == set(want)
    for name, value in want.items():
        assert got[name] == pytest.approx(float(value), rel=1e-12), name


def test_parts_and_idle_ranks_merge_to_the_whole(make_terms: MakeTerms) -> None:
    terms = make_terms(2)
    settings = ObjectiveSettings(behave_cap=1.3)
    whole = figures(terms, settings)
    merged = empty()
    for rows in ([0, 2], [1]):
        chosen = torch.isin(terms.row_T, torch.tensor(rows))
        per_token = ("theta_T", "prox_T", "behave_T", "advantage_T", "mask_T", "row_T")
        part = replace(terms, **{name: getattr(terms, name)[chosen] for name in per_token})
        loss = get_objective("decoupled_ppo")(part, settings)
        entropy_T = torch.linspace(0, 1, terms.mask_T.numel(), dtype=torch.float64)[chosen]
        merged = merge(
            merged,
            measure(
                part,
                loss,
                entropy_T=entropy_T,
                version_T=versions(terms)[chosen],
                version=VERSION,
                behave_cap=settings.behave_cap,
            ),
        )
    torch.testing.assert_close(merged.sums, whole.sums, rtol=1e-13, atol=1e-13)
    assert merged.maxima.equal(whole.maxima)
    nothing = replace(terms, mask_T=torch.zeros_like(terms.mask_T))
    assert not figures(nothing, settings).sums.any()


def test_on_policy_data_looks_on_policy(make_terms: MakeTerms) -> None:
    terms = make_terms(3, masked=False)
    same = replace(terms, theta_T=terms.behave_T, prox_T=terms.behave_T)
    got = finalise(figures(same, ObjectiveSettings(), torch.full_like(terms.row_T, VERSION)))
    assert (got["ess"], got["ess_sequence"], got["weight_max"], got["ratio_max"]) == (1.0, 1.0, 1.0, 1.0)
    for name in ("kl_k1", "kl_k3", "chi2", "clipped_fraction", "capped_fraction", "lag_max", "logprob_gap_max"):
        assert got[name] == 0.0, name
    assert got["fresh_fraction"] == 1.0


def test_one_heavy_token_ruins_the_effective_size(make_terms: MakeTerms) -> None:
    terms = make_terms(4, masked=False)
    prox_T = terms.behave_T.clone()
    prox_T[0] += 15.0
    got = finalise(figures(replace(terms, prox_T=prox_T), ObjectiveSettings()))
    assert got["ess"] == pytest.approx(1 / terms.mask_T.numel(), rel=1e-3)


def test_only_rows_written_wholly_under_the_current_version_feed_the_gap(make_terms: MakeTerms) -> None:
    terms = make_terms(5, masked=False)
    version_T = torch.full_like(terms.row_T, VERSION)
    version_T[0] = VERSION - 1  # one old token makes row 0 stale
    got = finalise(figures(terms, ObjectiveSettings(), version_T))
    gap = (terms.prox_T - terms.behave_T).abs()[terms.row_T != 0]
    assert got["logprob_gap_mean"] == pytest.approx(float(gap.mean()), rel=1e-12)
    assert got["fresh_fraction"] == pytest.approx(8 / 13)


def test_very_old_tokens_share_the_last_bin(make_terms: MakeTerms) -> None:
    terms = make_terms(6, masked=False)
    got = finalise(figures(terms, ObjectiveSettings(), torch.full_like(terms.row_T, VERSION - LAG_BINS - 40)))
    assert got[f"lag_tokens_{LAG_BINS - 1}+"] == terms.mask_T.numel()
    assert got["lag_max"] == LAG_BINS + 40


def test_nothing_measured_gives_harmless_figures() -> None:
    got = finalise(empty())
    assert got["ess"] == 1.0
    assert all(np.isfinite(value) for value in got.values())


def test_rows_that_lost_every_token_are_counted_as_rejected(make_terms: MakeTerms) -> None:
    terms = make_terms(1)
    keep_T = terms.row_T != 1
    sums = figures(replace(terms, keep_T=keep_T), ObjectiveSettings(behave_cap=None))
    assert finalise(sums)["rejected_fraction"] == pytest.approx(1 / 3)
