import pytest

from areal_like.errors import BreakerTripped
from areal_like.rollout.breaker import Breaker


def raised(message: str) -> Exception:
    try:
        raise ValueError(message)
    except ValueError as error:
        return error


def test_the_last_failure_in_a_row_trips_it() -> None:
    breaker = Breaker(limit=3)
    breaker.failure(raised("row 1"))
    breaker.failure(raised("row 2"))
    with pytest.raises(BreakerTripped, match="3 episodes failed in a row"):
        breaker.failure(raised("row 3"))


def test_a_success_starts_the_row_anew() -> None:
    breaker = Breaker(limit=2)
    for _ in range(5):
        breaker.failure(raised("now and then"))
        breaker.success()
    statistics = breaker.statistics()
    assert (statistics.in_a_row, statistics.total, statistics.limit) == (0, 5, 2)


def test_it_names_the_fault_seen_most_often_with_its_traceback() -> None:
    breaker = Breaker(limit=4)
    for error in [KeyError("rare"), raised("row 1"), raised("row 2")]:
        breaker.failure(error)
    with pytest.raises(BreakerTripped) as caught:
        breaker.failure(KeyError(1, 2))
    message = str(caught.value)
    assert "2 of them with ValueError: row 1" in message
    assert "raise ValueError(message)" in message


def test_faults_before_a_success_are_not_blamed() -> None:
    breaker = Breaker(limit=2)
    breaker.failure(KeyError("before"))
    breaker.success()
    breaker.failure(raised("after"))
    with pytest.raises(BreakerTripped, match="2 of them with ValueError: after"):
        breaker.failure(raised("after"))


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Breaker(limit=0)
