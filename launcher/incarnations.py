"""Under which incarnation a run commands servers that somebody else started, so that no two runs share one.

    read the newest of each server --> claim the next on every one of them --> all granted: ours
                ^                                |
                +----- another run was there ----+

Embedded servers grant an incarnation once, by comparing and setting. Engines of others have no such call: two runs that
join one of them at the same moment get the same, so they must be started one after the other.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from areal_like.client.control import ClaimsServer, ServerControl
from areal_like.errors import ServerUnavailable, StaleCommand

#: tries to claim all servers; each lost one was lost to a run that joined in that moment
_TRIES = 10
#: longest pause between two tries, in seconds: two runs that claim several servers crosswise must fall out of step
_PAUSE = 0.5


async def claim_incarnation(controls: Sequence[ServerControl], *, run_id: str, timeout: float) -> int:
    """Claim the next incarnation on every server; returns it.

    Raises:
        ServerUnavailable: a server does not answer within ``timeout`` seconds, or other runs were always faster.
    """
    for _ in range(_TRIES):
        answers = [await control.health(timeout=timeout) for control in controls]
        incarnation = 1 + max(answer.incarnation for answer in answers)
        try:
            for control in controls:
                await claim(control, incarnation, run_id=run_id, timeout=timeout)
            return incarnation
        except StaleCommand:
            await asyncio.sleep(_PAUSE * random.random())
    raise ServerUnavailable(
        f"rollout.servers: other runs joined them at the same time, {_TRIES} times; start one run after the other"
    )


async def claim(control: ServerControl, incarnation: int, *, run_id: str, timeout: float) -> None:
    """Claim ``incarnation`` on one server, if its engine can grant it.

    Raises:
        StaleCommand: another run has it, or a newer one.
    """
    if isinstance(control, ClaimsServer):
        await control.claim(incarnation=incarnation, run_id=run_id, timeout=timeout)
