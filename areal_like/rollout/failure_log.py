"""Failed episodes in the log: every one in a line, each different fault once with its traceback."""

from __future__ import annotations

import logging
from collections import OrderedDict

from areal_like.rollout.failure import headline_of, signature_of

#: different faults that are remembered; the least recent is forgotten first, and then shown in full again
_REMEMBERED = 256


class FailureLog:
    """Deduplicates by type, place and message without its numbers."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._seen: OrderedDict[str, int] = OrderedDict()

    def record(self, error: BaseException, *, where: str) -> None:
        """Log one failure. ``where`` names the episode or group."""
        signature = signature_of(error)
        times = self._seen.pop(signature, 0) + 1
        self._seen[signature] = times
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        if times == 1:
            self._logger.error("%s failed: %s", where, headline_of(error), exc_info=error)
        else:
            # for the log file: a console that shows every one of them shows nothing else
            self._logger.info("%s failed: %s (%d times; traceback above)", where, headline_of(error), times)
