"""A process that runs the user's reward function, one call after another. Started by ``reward_pool``; stdlib only.

``python -m areal_like.rollout.reward_worker <parent pid> <socket descriptor> <dotted path>``. Requests are pickles
from our own parent, each behind its length and serial; answers are JSON lines with the serials, in the order of the
requests, each sent at once, so that the parent knows at any moment which call is running.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import math
import os
import pickle
import pkgutil
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeGuard

#: bytes of the pickle that follows, and the call's serial
HEAD = struct.Struct("!IQ")
#: longest message and traceback (its end) that is sent back
_MESSAGE, _TRACEBACK = 2_000, 16_000
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one call: a ``reward``, or None and the ``error``. ``seconds`` is the time in user code."""

    seconds: float
    reward: float | None
    error: str

    @classmethod
    def of(cls, message: dict[str, Any], serial: int) -> Answer:
        """The answer to call ``serial`` as it was sent.

        Raises:
            ValueError: ``message`` is none.
        """
        seconds, reward, error = (message.get(key) for key in ("seconds", "reward", "error"))
        answered = isinstance(error, str) if reward is None else _is_finite(reward) and error is None
        if message.get("serial") != serial or not answered or not _is_finite(seconds):
            raise ValueError(f"no answer to call {serial}: {message!r:.200}")
        return cls(seconds=seconds, reward=reward, error=error or "")


def _is_finite(value: object) -> TypeGuard[float]:
    return type(value) is float and math.isfinite(value)


def finite_number(value: object) -> float:
    """``value`` as a float.

    Raises:
        TypeError: it is no number (text and None are none).
        ValueError: it is not finite.
    """
    if inspect.isawaitable(value):
        raise TypeError("it returned an awaitable; declare the function itself with `async def`")
    if not hasattr(value, "__float__"):
        raise TypeError(f"it returned {value!r:.200} ({type(value).__name__}), not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}, not a finite number")
    return number


def describe(error: BaseException) -> str:
    """Type and message of ``error`` on one line, then its traceback from the user's frame on."""
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
    lines = "".join(traceback.format_exception(type(error), error, trace))
    try:
        message = str(error)
    except Exception:  # of the user's, too
        message = "(its message cannot be shown)"
    summary = " ".join(f"{type(error).__name__}: {message}".split())
    return f"{summary[:_MESSAGE]}\n{lines[-_TRACEBACK:]}"


def answer(function: Callable[..., Any], request: bytes) -> dict[str, Any]:
    """Run one pickled request ``(positional, keywords)``."""
    started = time.perf_counter()
    try:
        positional, keywords = pickle.loads(request)
        outcome: dict[str, Any] = {"reward": finite_number(function(*positional, **keywords))}
    except BaseException as error:  # supervision boundary: whatever user code raises is an answer
        outcome = {"error": describe(error)}
    outcome["seconds"] = time.perf_counter() - started
    return outcome


def serve(channel: socket.socket, path: str) -> None:
    """Answer requests until the parent closes its end."""
    worker = os.getpid()
    try:
        function = pkgutil.resolve_name(path)
    except BaseException as error:  # supervision boundary: user code runs at import
        _send(channel, {"error": describe(error)})
        return
    _send(channel, {"ready": True})
    with channel.makefile("rb") as requests:
        while request := _read(requests):
            serial, call = request
            outcome = answer(function, call)
            if os.getpid() != worker:  # the function forked, and the child came back from it, too: not ours to answer
                os._exit(0)
            _send(channel, {"serial": serial, **outcome})


def _read(requests: BinaryIO) -> tuple[int, bytes] | None:
    """Serial and pickle of the next request; None at the end."""
    head = requests.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    length, serial = HEAD.unpack(head)
    return serial, requests.read(length)


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def _die_with(parent: int) -> None:
    """Be killed by the kernel when the parent dies, however that happens (Linux; elsewhere: at the end of file)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request
        sys.exit(1)


def main() -> None:
    parent, descriptor, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    with socket.socket(fileno=descriptor) as channel:
        try:
            serve(channel, path)
        except (BrokenPipeError, ConnectionResetError):
            return


if __name__ == "__main__":
    main()
