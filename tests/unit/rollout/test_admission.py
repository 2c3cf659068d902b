from dataclasses import replace

import pytest

from areal_like.rollout.admission import AdmissionFacts, AdmissionVerdict, StalenessLimits, decide, slots

LIMITS = StalenessLimits(batch_size=4, max_head_offpolicyness=2, total_train_steps=10, max_concurrent_rollouts=8)
FACTS = AdmissionFacts(live=0, running=0, batches_taken=5, acknowledged=5, prompts_left=True)


@pytest.mark.parametrize(
    ("eta", "taken", "acknowledged", "expected"),
    [
        (0, 5, 5, 4),  # synchronous: one batch
        (0, 6, 5, 0),  # ... and nothing while the trainer updates
        (2, 5, 5, 12),
        (2, 6, 5, 8),  # a publication is under way
        (2, 8, 5, 0),  # three publications failed
        (2, 9, 5, -4),
        (2, 8, 8, 8),  # two steps are left
        (2, 9, 9, 4),
    ],
)
def test_slots_by_hand(eta: int, taken: int, acknowledged: int, expected: int) -> None:
    limits = replace(LIMITS, max_head_offpolicyness=eta)
    assert slots(limits, batches_taken=taken, acknowledged=acknowledged) == expected


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"live": 11, "running": 7}, AdmissionVerdict.ADMIT),
        ({"live": 12, "running": 0}, AdmissionVerdict.STALENESS),
        ({"live": 0, "batches_taken": 8}, AdmissionVerdict.STALENESS),
        ({"live": 8, "running": 8}, AdmissionVerdict.CONCURRENCY),
        ({"live": 4, "batches_taken": 9, "acknowledged": 9}, AdmissionVerdict.END_OF_RUN),
        ({"live": 0, "batches_taken": 10, "acknowledged": 10}, AdmissionVerdict.END_OF_RUN),
        ({"acknowledged": None, "batches_taken": 0}, AdmissionVerdict.UNPUBLISHED),
        ({"prompts_left": False}, AdmissionVerdict.NO_PROMPT),
        ({"stopped": True}, AdmissionVerdict.STOPPED),
    ],
)
def test_verdicts(changes: dict[str, object], verdict: AdmissionVerdict) -> None:
    assert decide(LIMITS, replace(FACTS, **changes)) is verdict  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "field", ["batch_size", "max_head_offpolicyness", "total_train_steps", "max_concurrent_rollouts"]
)
def test_limits_name_the_field_that_is_out_of_bounds(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at least"):
        replace(LIMITS, **{field: -1})
