"""What runs inside vLLM's own processes, in vLLM's own environment. Nothing else of the project imports it."""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing import connection, parent_process

#: the name by which ``--weight-transfer-config`` asks for our engine
BACKEND = "areal_like"


def register() -> None:
    """The ``vllm.general_plugins`` entry point. vLLM calls it in the API server, the engine core and every worker."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    _end_with_parent()
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, f"{__name__}.engine", "StagedTransferEngine")


def _end_with_parent() -> None:
    """An API server that is killed leaves its engine core and workers behind (gigabytes each): they end with it."""
    parent = parent_process()
    if parent is None or any(thread.name == _WATCH for thread in threading.enumerate()):
        return

    def watch() -> None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name=_WATCH, daemon=True).start()


_WATCH = "areal-like-parent-watch"
