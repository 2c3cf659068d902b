"""Environment of the processes of a run: every one sets its own thread count.

Two processes with two threads each on two cores ran 100 times slower than with one thread each: the pools' workers
spin while they wait for each other.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from launcher.child import PARENT_VARIABLE, RUN_VARIABLE, TOKEN_VARIABLE

#: every pool of threads that a numerical library may start behind our back
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMEXPR_MAX_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
)


def thread_environment(threads: int) -> dict[str, str]:
    """Variables that give a process ``threads`` compute threads, and idle ones that sleep instead of spinning."""
    return {
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }


def quiet_own_threads() -> None:
    """One compute thread for this process and what inherits its environment (reward workers), unless told otherwise."""
    for name, value in thread_environment(1).items():
        os.environ.setdefault(name, value)


def loopback_collectives() -> dict[str, str]:
    """Train ranks of one host meet on its loopback interface: gloo would listen wherever the host's own name leads."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {} if "GLOO_SOCKET_IFNAME" in os.environ or not names else {"GLOO_SOCKET_IFNAME": names[0]}


def child_environment(
    *, threads: int, token: str, run_id: str, extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of one child: ours, its thread count, the run's token and id, then ``extra``."""
    own_path = os.environ.get("PYTHONPATH", "")
    here = str(Path.cwd())
    return {
        **os.environ,
        **thread_environment(threads),
        **loopback_collectives(),
        "PYTHONUNBUFFERED": "1",  # the last lines of a log are the ones that matter
        "PYTHONFAULTHANDLER": "1",  # a crash in native code leaves its Python stack in the log
        "PYTHONPATH": f"{here}{os.pathsep}{own_path}" if own_path else here,
        TOKEN_VARIABLE: token,
        RUN_VARIABLE: run_id,
        PARENT_VARIABLE: str(os.getpid()),
        **(extra or {}),
    }
