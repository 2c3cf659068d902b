"""Text of logs and tracebacks as a person reads it: without marks under the code and without progress bars."""

from __future__ import annotations

import re

#: "    ^^^^~~~" under a line of a traceback
_MARKS = re.compile(r"\s*[\^~]+[\s\^~]*")
#: what tqdm draws: "Loading weights:  45%|####5     | 9/20"
_BAR = re.compile(r"\d+%\|")


def readable_lines(text: str) -> list[str]:
    """The lines of ``text``; of a line that was drawn over itself, only what was seen last."""
    lines = [line.rstrip().rpartition("\r")[2] for line in text.split("\n")]
    kept = [line for line in lines if not _MARKS.fullmatch(line) and not _BAR.search(line)]
    while kept and not kept[-1]:
        kept.pop()
    return kept
