"""Every objective against a token-by-token rewriting in plain Python, value and gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch

from areal_like.algo.objectives import OBJECTIVES, get_objective
from areal_like.algo.settings import ObjectiveSettings, objective_settings
from areal_like.algo.terms import PolicyTerms
from areal_like.config.actor import ActorConfig

MakeTerms = Callable[..., PolicyTerms]
Token = tuple[float, float]  # loss of the token, and d(sum of losses)/d theta of the token


def rows_of(terms: PolicyTerms) -> list[list[dict[str, float]]]:
    """Unmasked tokens of every row as plain numbers."""
    rows: list[list[dict[str, float]]] = [[] for _ in range(terms.rows)]
    for t in range(terms.mask_T.numel()):
        if terms.mask_T[t]:
            names = ("theta", "prox", "behave", "advantage")
            token = {name: float(getattr(terms, f"{name}_T")[t].detach()) for name in names}
            rows[int(terms.row_T[t])].append(token | {"t": t})
    return rows


def weight(log_w: float, s: ObjectiveSettings) -> float:
    if s.behave_mode == "ignore":
        return 1.0
    w = math.exp(log_w)
    if s.behave_floor is not None and w < s.behave_floor:
        return 0.0
    if s.behave_cap is not None and w > s.behave_cap:
        return 0.0 if s.behave_mode == "mask" else s.behave_cap
    return w


def surrogate(r: float, a: float, s: ObjectiveSettings) -> Token:
    """max(-A r, -A clip(r)), then the dual clip; and its derivative by log r."""
    lo, hi = 1 - s.eps_clip, 1 + (s.eps_clip if s.eps_clip_higher is None else s.eps_clip_higher)
    if a >= 0:
        loss, slope = (-a * r, -a * r) if r <= hi else (-a * hi, 0.0)
    else:
        loss, slope = (-a * r, -a * r) if r >= lo else (-a * lo, 0.0)
        if s.c_clip is not None and r > s.c_clip:
            loss, slope = -a * s.c_clip, 0.0
    return loss, slope


def expected(name: str, terms: PolicyTerms, s: ObjectiveSettings) -> dict[int, Token]:
    out: dict[int, Token] = {}
    for row in rows_of(terms):
        mean_r = sum(k["theta"] - k["prox"] for k in row) / max(len(row), 1)
        tokens = {int(k["t"]): token_loss(name, k, row, mean_r, s) for k in row}
        if name == "gspo":  # the row's ratio moves with each of its tokens alike
            slope = sum(slope for _, slope in tokens.values()) / max(len(row), 1)
            tokens = {t: (loss, slope) for t, (loss, _) in tokens.items()}
        out |= tokens
    return out


def token_loss(
    name: str, k: dict[str, float], row: list[dict[str, float]], mean_r: float, s: ObjectiveSettings
) -> Token:
    theta, prox, behave, a = k["theta"], k["prox"], k["behave"], k["advantage"]
    log_r, log_w = theta - prox, prox - behave
    if name == "ppo":
        return surrogate(math.exp(theta - behave), a, s)
    if name in ("gspo", "gspo_token"):
        w = weight(sum(j["prox"] - j["behave"] for j in row) / len(row), s)
        loss, slope = surrogate(math.exp(mean_r), a, s)
        return w * loss, w * slope
    if name == "topr":
        c = min(math.exp(sum(j["theta"] - j["behave"] for j in row)), 1.0) if a < 0 else 1.0
        return -c * a * theta, -c * a
    if s.behave_level == "sequence":
        log_w = sum(j["prox"] - j["behave"] for j in row)
    elif s.behave_level == "geometric":
        log_w = sum(j["prox"] - j["behave"] for j in row) / len(row)
    w, r = weight(log_w, s), math.exp(log_r)
    if name == "m2po":
        kept = float(k["t"] % 3 != 2)
        return -kept * w * a * r, -kept * w * a * r
    if name == "decoupled_ppo":
        loss, slope = surrogate(r, a, s)
        return w * loss, w * slope
    if name == "cispo":
        c = min(r, 1 + (s.eps_clip if s.eps_clip_higher is None else s.eps_clip_higher))
        return -w * c * a * theta, -w * c * a
    assert name == "sapo"
    tau = s.tau_positive if a > 0 else s.tau_negative
    gate = 1 / (1 + math.exp(-tau * (r - 1)))
    return -w * a * 4 / tau * gate, -w * a * 4 * gate * (1 - gate) * r


SETTINGS = {
    "default": ObjectiveSettings(),
    "bare": ObjectiveSettings(behave_cap=None),
    "asymmetric": ObjectiveSettings(eps_clip=0.1, eps_clip_higher=0.4),
    "dual_clip": ObjectiveSettings(c_clip=1.5),
    "mask": ObjectiveSettings(behave_cap=1.2, behave_mode="mask"),
    "icepop": ObjectiveSettings(behave_cap=1.5, behave_mode="mask", behave_floor=0.7),
    "truncate": ObjectiveSettings(behave_cap=1.1),
    "ignore": ObjectiveSettings(behave_mode="ignore", behave_floor=0.9),
}
LEVELS = {
    "sequence_truncate": ObjectiveSettings(behave_cap=1.5, behave_level="sequence"),
    "sequence_mask": ObjectiveSettings(behave_cap=1.5, behave_level="sequence", behave_mode="mask"),
    "geometric_mask": ObjectiveSettings(
        behave_cap=1.05, behave_level="geometric", behave_mode="mask", behave_floor=0.95
    ),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.parametrize("seed", [0, 1])
def test_value_and_gradient_match_plain_python(make_terms: MakeTerms, name: str, case: str, seed: int) -> None:
    check(name, make_terms(seed), SETTINGS[case])


@pytest.mark.parametrize("name", ["decoupled_ppo", "cispo", "sapo"])
@pytest.mark.parametrize("case", LEVELS)
def test_weights_at_sequence_level_match_plain_python(make_terms: MakeTerms, name: str, case: str) -> None:
    check(name, make_terms(3), LEVELS[case])


def ready(name: str, terms: PolicyTerms) -> PolicyTerms:
    """M2PO needs to be told which tokens stay; here, all but every third."""
    keep_T = torch.arange(terms.mask_T.numel()) % 3 != 2
    return replace(terms, keep_T=keep_T) if name == "m2po" else terms


def check(name: str, terms: PolicyTerms, settings: ObjectiveSettings) -> None:
    terms = ready(name, terms)
    loss = get_objective(name)(terms, settings)
    loss.loss_T.sum().backward()
    want = expected(name, terms, settings)
    gradient = terms.theta_T.grad
    assert gradient is not None
    for t in range(terms.mask_T.numel()):
        value, slope = want.get(t, (0.0, 0.0))
        assert float(loss.loss_T[t].detach()) == pytest.approx(value, rel=1e-12, abs=1e-13)
        assert float(gradient[t]) == pytest.approx(slope, rel=1e-12, abs=1e-13)


@pytest.mark.parametrize("name", ["decoupled_ppo", "gspo", "gspo_token", "cispo", "sapo"])
def test_ratio_times_weight_is_theta_over_behave_without_clip_and_cap(make_terms: MakeTerms, name: str) -> None:
    terms = make_terms(4)
    loss = get_objective(name)(terms, ObjectiveSettings(eps_clip=0.999, eps_clip_higher=1e6, behave_cap=None))
    for row in rows_of(terms):
        logs = [k["theta"] - k["behave"] for k in row]
        for k, own in zip(row, logs, strict=True):
            want = sum(logs) / len(logs) if name.startswith("gspo") else own
            t = int(k["t"])
            assert float(loss.ratio_T[t] * loss.weight_T[t]) == pytest.approx(math.exp(want), rel=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_on_policy_gradient_is_the_policy_gradient(make_terms: MakeTerms, name: str) -> None:
    terms = make_terms(5, masked=False)
    # one advantage per row, as outcome rewards give
    advantage_T = terms.advantage_T[terms.row_T]
    theta_T = terms.behave_T.clone().requires_grad_()
    everything = torch.ones_like(terms.mask_T)
    on_policy = replace(terms, theta_T=theta_T, prox_T=terms.behave_T, advantage_T=advantage_T, keep_T=everything)
    get_objective(name)(on_policy, ObjectiveSettings()).loss_T.sum().backward()
    torch.testing.assert_close(theta_T.grad, -advantage_T, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_micro_batch_without_rows_or_written_tokens_is_legal(make_terms: MakeTerms, name: str) -> None:
    terms = make_terms(6)
    for empty in (
        replace(terms, mask_T=torch.zeros_like(terms.mask_T)),
        PolicyTerms(
            **{n: torch.zeros(0, requires_grad=n == "theta_T") for n in ("theta_T", "prox_T", "behave_T")},
            advantage_T=torch.zeros(0),
            mask_T=torch.zeros(0, dtype=torch.bool),
            row_T=torch.zeros(0, dtype=torch.int64),
            rows=0,
        ),
    ):
        loss_T = get_objective(name)(ready(name, empty), ObjectiveSettings()).loss_T
        loss_T.sum().backward()
        assert float(loss_T.detach().abs().sum()) == 0.0
        assert empty.theta_T.grad is not None
        assert bool((empty.theta_T.grad == 0).all())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_huge_ratios_give_finite_losses(make_terms: MakeTerms, name: str) -> None:
    terms = make_terms(7, masked=False)
    far = replace(terms, theta_T=terms.theta_T.detach() + 500.0, advantage_T=torch.zeros_like(terms.advantage_T))
    far = replace(far, theta_T=far.theta_T.requires_grad_(), behave_T=terms.behave_T - 500.0)
    loss_T = get_objective(name)(ready(name, far), ObjectiveSettings(behave_cap=None)).loss_T
    loss_T.sum().backward()
    assert bool(torch.isfinite(loss_T.detach()).all())
    assert far.theta_T.grad is not None
    assert bool(torch.isfinite(far.theta_T.grad).all())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_is_not_to_be_kept_is_dropped_by_every_objective(make_terms: MakeTerms, name: str) -> None:
    terms = make_terms(8)
    keep_T = terms.row_T != 2  # as the overlong filter does: a whole row
    settings = ObjectiveSettings(behave_mode="ignore")
    loss = get_objective(name)(replace(terms, keep_T=keep_T), settings)
    loss.loss_T.sum().backward()
    assert terms.theta_T.grad is not None
    assert loss.dropped_T.equal(terms.mask_T & ~keep_T)
    assert not loss.loss_T.detach()[~keep_T].any() and not terms.theta_T.grad[~keep_T].any()
    assert loss.loss_T.detach()[keep_T].any()


def test_dropped_tokens_are_marked_and_carry_no_weight(make_terms: MakeTerms) -> None:
    terms = make_terms(8)
    keep_T = torch.ones_like(terms.mask_T)
    keep_T[0] = False
    settings = ObjectiveSettings(behave_cap=1.2, behave_mode="mask")
    loss = get_objective("decoupled_ppo")(replace(terms, keep_T=keep_T), settings)
    over = [int(k["t"]) for row in rows_of(terms) for k in row if math.exp(k["prox"] - k["behave"]) > 1.2]
    assert over
    dropped = sorted({0, *over})
    assert loss.dropped_T.nonzero().flatten().tolist() == dropped
    assert not loss.loss_T.detach()[dropped].any()


def test_the_dual_clip_acts_before_the_weight() -> None:
    # A = -2, r = 4, w = 3: min(8, 2 * 1.5) * 3 = 9, not min(24, 3) = 3
    terms = PolicyTerms(
        theta_T=torch.tensor([math.log(0.6)], dtype=torch.float64),
        prox_T=torch.tensor([math.log(0.15)], dtype=torch.float64),
        behave_T=torch.tensor([math.log(0.05)], dtype=torch.float64),
        advantage_T=torch.tensor([-2.0], dtype=torch.float64),
        mask_T=torch.tensor([True]),
        row_T=torch.tensor([0]),
        rows=1,
    )
    loss = get_objective("decoupled_ppo")(terms, ObjectiveSettings(c_clip=1.5))
    assert float(loss.loss_T[0]) == pytest.approx(9.0, rel=1e-12)


def test_the_experiment_file_knows_exactly_the_registered_objectives() -> None:
    assert set(get_args(ActorConfig.model_fields["objective"].annotation)) == set(OBJECTIVES)


def test_settings_are_read_from_the_actor_section() -> None:
    actor = ActorConfig(eps_clip=0.1, eps_clip_higher=0.3, c_clip=3.0, behave_cap=None, behave_level="sequence")
    settings = objective_settings(actor)
    assert (settings.eps_clip, settings.eps_high, settings.c_clip) == (0.1, 0.3, 3.0)
    assert (settings.behave_cap, settings.behave_level) == (None, "sequence")
    assert objective_settings(ActorConfig()) == ObjectiveSettings()


def test_an_unknown_objective_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'dpo' is unknown.*decoupled_ppo"):
        get_objective("dpo")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"aggregation": "seq_mean_token_sum"}, "aggregation_constant, which is missing"),
        ({"aggregation_constant": 8.0}, "has no effect with aggregation token_mean"),
        ({"objective": "gspo", "behave_level": "sequence"}, "at its own level"),
        ({"objective": "m2po", "prox": "behave"}, "needs prox: recompute"),
        ({"advantage": "rloo", "adv_norm": {"std_level": "batch"}}, "say different things"),
        ({"advantage": "gae", "adv_norm": {"mean_level": "batch"}}, "say different things"),
        ({"advantage": "grpo", "gae_lambda": 0.9}, "no effect without advantage: gae"),
        ({"shaping": {"overlong_penalty": 0.5}}, "no effect without overlong_margin"),
        ({"shaping": {"length_limit": 5}}, "no effect without overlong_margin or overlong_filter"),
    ],
)
def test_combinations_that_mean_nothing_are_refused(section: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActorConfig.model_validate(section)
