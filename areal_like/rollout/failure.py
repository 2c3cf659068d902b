"""What an exception out of an episode means: whose fault it is, and how it is recognised when it comes again."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from enum import StrEnum

import areal_like
from areal_like.errors import InfrastructureError, NoServerAvailable, RequestError

#: lines of a traceback that are shown in one message: the innermost frames, where the fault is
TRACEBACK_TAIL = 12
_OURS = os.path.dirname(areal_like.__file__)
#: "    ^^^^~~~" under a line of a traceback
_MARKS = re.compile(r"\s*[\^~]+[\s\^~]*")
_TRACEBACK = "Traceback (most recent call last):"
#: numbers and addresses differ between two occurrences of the same fault
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")


class FailureKind(StrEnum):
    """What to do about a failed episode."""

    FATAL = "fatal"  #: no server is left: the run cannot go on
    INFRASTRUCTURE = "infrastructure"  #: a server or worker failed: try again, the workflow is not to blame
    REQUEST = "request"  #: a request that can never succeed: trying again would ask the same
    WORKFLOW = "workflow"  #: the user's code failed, or ran past its time limit


def kind_of(error: BaseException) -> FailureKind:
    """Judge an exception by what caused it: explicit causes and the members of exception groups count."""
    causes = list(_causes(error))
    if no_server_in(error) is not None:
        return FailureKind.FATAL
    if any(isinstance(c, InfrastructureError) for c in causes):
        return FailureKind.INFRASTRUCTURE
    if any(isinstance(c, RequestError) for c in causes):
        return FailureKind.REQUEST
    return FailureKind.WORKFLOW


def no_server_in(error: BaseException) -> NoServerAvailable | None:
    """The cause that makes an exception fatal, if it is."""
    return next((c for c in _causes(error) if isinstance(c, NoServerAvailable)), None)


def signature_of(error: BaseException) -> str:
    """The same for two occurrences of one fault: type, place, and the message without its numbers."""
    leaf = root_of(error)
    frames = traceback.extract_tb(leaf.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
    return f"{type(leaf).__qualname__}|{place}|{_VARYING.sub('#', message_of(leaf))[:200]}"


def headline_of(error: BaseException) -> str:
    """``Type: message`` on one line; the type alone where there is no message.

    A traceback inside the message, as of code that ran in another process, is left out.
    """
    leaf = root_of(error)
    message = " ".join(message_of(leaf).partition(_TRACEBACK)[0].split())[:500]
    return f"{type(leaf).__qualname__}: {message}" if message else type(leaf).__qualname__


def traceback_tail(error: BaseException) -> str:
    """The innermost lines of the traceback, causes included, and the innermost frame of the user's own code."""
    leaf = root_of(error)
    lines = "".join(traceback.format_exception(leaf)).rstrip().splitlines()
    lines = [line for line in lines if not _MARKS.fullmatch(line)]
    tail, own = lines[-TRACEBACK_TAIL:], _users_frame(leaf)
    if own is not None and not any(f'"{own.filename}", line {own.lineno},' in line for line in tail):
        shown = [line for line in traceback.format_list([own])[0].splitlines() if not _MARKS.fullmatch(line)]
        tail = [*shown, "  ...", *tail[len(shown) + 1 :]]
    return "\n".join(tail)


def _users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame that is neither ours nor of an installed package; None if there is none."""
    others = (_OURS, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((f for f in frames if not f.filename.startswith((*(f"{o}{os.sep}" for o in others), "<"))), None)


def message_of(error: BaseException) -> str:
    """``str(error)``, also where the error is a user's and cannot be shown."""
    try:
        return str(error)
    except Exception as broken:  # of the user's class, and no reason to lose the error itself
        return f"(its message cannot be shown: {type(broken).__qualname__})"


def root_of(error: BaseException) -> BaseException:
    """The first member of an exception group, found through nested groups; any other exception itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _causes(error: BaseException) -> Iterator[BaseException]:
    yield error
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _causes(member)
    if error.__cause__ is not None:
        yield from _causes(error.__cause__)
