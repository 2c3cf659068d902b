"""What a child process of a run does first, and the environment variables by which it is told its secrets.

Secrets travel in the environment, never on the command line, which every user of the machine can read.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

#: bearer token of the run's HTTP servers
TOKEN_VARIABLE = "AREAL_LIKE_TOKEN"
#: process id of the controller, to notice that it died before the child could ask for its death signal
PARENT_VARIABLE = "AREAL_LIKE_PARENT_PID"
#: names the run's shared-memory segments and log lines
RUN_VARIABLE = "AREAL_LIKE_RUN_ID"

_PR_SET_PDEATHSIG = 1
#: seconds between looks at the parent where the kernel offers no death signal
_PARENT_POLL = 1.0
#: exit status of a child whose controller is gone (as after SIGKILL)
_ORPHANED = 128 + signal.SIGKILL


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Make sure this process does not outlive the controller, whatever kills that: call it before heavy imports.

    ``number``: a role that has children of its own asks for SIGTERM, and ends them.
    On Linux the kernel sends it when the *thread* that started this process ends, which is the controller's
    main thread. Elsewhere a daemon thread watches the parent's id.
    """
    expected = int(os.environ.get(PARENT_VARIABLE, "0")) or os.getppid()
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    else:
        threading.Thread(target=_watch_parent, args=(expected, number), name="parent-watch", daemon=True).start()
    if os.getppid() != expected:  # it died in between: no signal will come
        os._exit(_ORPHANED)


def run_token() -> str:
    """The run's bearer token.

    Raises:
        RuntimeError: this process was not started by a launcher.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise RuntimeError(f"{TOKEN_VARIABLE} is not set: roles are started by `areal-like run`, not by hand")
    return token


def _watch_parent(expected: int, number: signal.Signals) -> None:
    while os.getppid() == expected:
        time.sleep(_PARENT_POLL)
    if number != signal.SIGKILL:
        os.kill(os.getpid(), number)
        return
    os._exit(_ORPHANED)
