"""SGLang's server: ``python serve.py <SGLang's own flags>``. The bearer token comes from the environment.

On a command line the token could be read by every user of the machine. Run by its path: imports nothing of ours but
its neighbour, which lies in the same folder. Processes that SGLang spawns import this file again, before SGLang.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

#: holds the bearer token
TOKEN_VARIABLE = "SGLANG_API_KEY"
#: set by our adapter (and read by SGLang itself) where the server runs on a CPU
CPU_VARIABLE = "SGLANG_USE_CPU_ENGINE"

if os.environ.get(CPU_VARIABLE) == "1":
    import cpu_shims  # type: ignore[import-not-found]  # a neighbour of a script

    cpu_shims.install()


def _keep_secret(token: str) -> None:
    """SGLang logs its arguments: the token must not be among them, in any of its processes."""
    make = logging.getLogRecordFactory()

    def masked(*arguments: Any, **named: Any) -> logging.LogRecord:
        record = make(*arguments, **named)
        text = record.getMessage()
        if token in text:
            record.msg, record.args = text.replace(token, "<token>"), None
        return record

    logging.setLogRecordFactory(masked)


if os.environ.get(TOKEN_VARIABLE):
    _keep_secret(os.environ[TOKEN_VARIABLE])


def main(arguments: list[str]) -> None:
    """Serve until told to end."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        sys.exit(f"{TOKEN_VARIABLE} is not set: every path of a server asks for the run's token")
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args([*arguments, "--api-key", token]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
