from __future__ import annotations

import pytest

from areal_like.api.wire import HealthAnswer
from areal_like.client.health import Acknowledged, HealthPolicy, fault_of


def _answer(**change: object) -> HealthAnswer:
    fields = {"status": "ok", "version": 3, "incarnation": 1, "paused": False, "in_flight": 0, "queued": 0}
    return HealthAnswer.model_validate({**fields, "context_length": 8, **change})


@pytest.mark.parametrize(
    ("acknowledged", "answer"),
    [
        (None, _answer()),
        (Acknowledged(incarnation=1, version=3), _answer()),
        (Acknowledged(incarnation=1, version=2), _answer()),
        (Acknowledged(incarnation=0, version=9), _answer()),
    ],
)
def test_the_acknowledged_version_or_a_newer_one_is_sound(
    acknowledged: Acknowledged | None, answer: HealthAnswer
) -> None:
    assert fault_of(answer, acknowledged) is None


def test_older_weights_than_acknowledged_mean_a_restart() -> None:
    for answer in (_answer(version=2), _answer(incarnation=0, version=9)):
        assert "restarted" in str(fault_of(answer, Acknowledged(incarnation=1, version=3)))


def test_a_server_that_reports_failure_is_believed() -> None:
    assert fault_of(_answer(status="failed", reason="decode loop died"), None) == "it reports: decode loop died"


def test_questions_follow_sooner_after_a_failure() -> None:
    policy = HealthPolicy(interval=2.0, retry=0.1)
    assert [policy.pause(n) for n in range(7)] == pytest.approx([2.0, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0])


def test_a_server_that_keeps_failing_waits_longer_each_time() -> None:
    policy = HealthPolicy(readmit_after=5.0, readmit_limit=30.0)
    assert [policy.readmission_pause(n) for n in (1, 2, 3, 4, 5000)] == [5.0, 10.0, 20.0, 30.0, 30.0]
