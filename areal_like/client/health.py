"""Judging a server by its health answers. Pure: facts in, verdict out."""

from __future__ import annotations

from dataclasses import dataclass

from areal_like.api.wire import HealthAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged:
    """The last receipt of a server: what it must serve at least."""

    incarnation: int
    version: int


#: readmissions in a row that may fail while the server answers, until nobody waits for it any more
GIVE_UP_AFTER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPolicy:
    """Seconds and counts of the health loop.

    Attributes:
        interval: between two questions to a healthy server.
        timeout: until one question counts as unanswered.
        failures: unanswered questions in a row that end a server's time in the rotation.
        retry: after an unanswered question, doubling up to ``interval``: a refused connection is decided in a moment.
        readmit_after: between an ejection and the next try to come back, doubling with each ejection...
        readmit_limit: ...up to this.
    """

    interval: float = 2.0
    timeout: float = 10.0
    failures: int = 3
    retry: float = 0.1
    readmit_after: float = 5.0
    readmit_limit: float = 300.0

    def pause(self, failures: int) -> float:
        """Seconds until the next question after ``failures`` unanswered ones in a row."""
        return self.interval if failures == 0 else min(self.retry * 2.0 ** (failures - 1), self.interval)

    def readmission_pause(self, ejections: int) -> float:
        """Seconds that a server stays out after its ``ejections``-th ejection."""
        return min(self.readmit_after * 2.0 ** min(max(ejections - 1, 0), 16), self.readmit_limit)


def taken_by(answer: HealthAnswer, commanded: int | None) -> int | None:
    """The incarnation of another run that has taken the server over from ours, which commands under ``commanded``."""
    return answer.incarnation if commanded is not None and answer.incarnation > commanded else None


def fault_of(answer: HealthAnswer, acknowledged: Acknowledged | None) -> str | None:
    """Why a server that answered must leave the rotation, or None.

    ``acknowledged`` is its last receipt *before* the question was asked: a newer version in the answer is a commit
    under way, an older one a server that was restarted behind our back.
    """
    if answer.status != "ok":
        return f"it reports: {answer.reason or answer.status}"
    if acknowledged is None:
        return None
    if (answer.incarnation, answer.version) < (acknowledged.incarnation, acknowledged.version):
        return (
            f"it serves version {answer.version} of incarnation {answer.incarnation} after acknowledging "
            f"{acknowledged.version} of {acknowledged.incarnation}: it was restarted"
        )
    return None
