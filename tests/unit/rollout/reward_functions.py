"""Reward functions for the tests of the reward pool: good ones, slow ones, deadly ones."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def length(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    return float(len(completion_ids))


def process_id(*_: Any, **data: Any) -> int:
    return os.getpid()


class Unshowable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def _sockets() -> list[int]:
    """Descriptors of this process that are sockets: the worker's to its pool."""
    found = (int(name) for name in os.listdir("/proc/self/fd"))
    return [number for number in found if os.path.exists(f"/proc/self/fd/{number}") and _is_socket(number)]


def _is_socket(number: int) -> bool:
    return stat.S_ISSOCK(os.fstat(number).st_mode)


def as_told(prompt: str, completions: str, *_: Any, **data: Any) -> Any:
    """Does what ``completions`` says, so that one pool serves every case."""
    match completions:
        case "raise":
            raise ValueError("the answer\nhas two lines")
        case "nan":
            return float("nan")
        case "none":
            return None
        case "text":
            return "1.0"
        case "true":
            return True
        case "print":
            sys.stdout.write("to stdout\n")
            os.write(1, b"raw to descriptor 1\n")
            return 0.0
        case "exit":
            sys.exit(3)
        case "panic":
            raise BaseException("in Rust")
        case "interrupt":
            raise KeyboardInterrupt
        case "fork":
            return float(os.fork() > 0)  # 0.0 in the child, which comes back from here, too
        case "write":
            for descriptor in _sockets():
                os.write(descriptor, data["line"].encode() + b"\n")
        case "write once":
            note = Path(data["note"])
            if not note.exists():
                note.write_text("written")
                for descriptor in _sockets():
                    os.write(descriptor, b"{}\n")
        case "unshowable":
            raise Unshowable
        case "die":
            os._exit(4)
        case "hang":
            while True:
                time.sleep(60)
        case "hang with child":
            child = subprocess.Popen(["sleep", "600"])
            os.write(1, f"{child.pid}\n".encode())
            child.wait()
        case "die once":
            note = Path(data["note"])
            if not note.exists():
                note.write_text("died")
                os.kill(os.getpid(), signal.SIGKILL)
            return 1.0
    return 1.0


def torch_free(*_: Any, **data: Any) -> float:
    return float("torch" not in sys.modules and "numpy" not in sys.modules)


def fields(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """1 if the four arguments are the call's own and the row's other fields came along."""
    own = (prompt, completions, prompt_ids, completion_ids) == ("p", "c", [1], [2])
    return float(own and sorted(data) == ["anything", "secret"])


async def awaited(prompt: str, completions: str, *_: Any, **data: Any) -> float:
    if completions == "hang":
        await asyncio.Event().wait()
    if completions == "raise":
        raise ValueError("no such answer")
    await asyncio.sleep(0)
    return 2.0


class AsyncCallable:
    async def __call__(self, *_: Any, **data: Any) -> float:
        return 3.0


async_object = AsyncCallable()
not_callable = 3
