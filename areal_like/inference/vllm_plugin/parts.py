"""Where the seconds of a load go: one reading of the clock at each step, nothing of it on the device."""

from __future__ import annotations

import time


class Parts:
    """Seconds by part, one after the other; a part may come more than once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def end(self, part: str) -> None:
        """What went on since the last call, or since construction, was ``part``."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now
