"""A trainer that ends while it sends: ``python doomed_trainer.py MODEL DTYPE BUCKET_BYTES SIGNAL MOMENT``.

Once ready it says so. Asked on its standard input for "VERSION INCARNATION", it answers with a manifest of the
collective transport. At the third broadcast it sends itself the signal: ``between`` it and the one before, while its
receivers wait for the first byte, or ``within`` it, when some of its bytes have left. Nothing after that is ever sent.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch.distributed as dist
from subjects import load_model, perturbed

from areal_like.api.weights import TransportKind
from areal_like.weights.transports.base import make_writer

#: the broadcast that is the last, counted from 1
FATAL = 3
#: bytes of it that have left ``within`` it, where it has as many
LEFT = 2**20


class Doom:
    """Stands before gloo's broadcast and counts, whoever sends."""

    def __init__(self, number: signal.Signals, moment: str) -> None:
        self._number = number
        self._within = moment == "within"
        self._count = 0

    def over(self, broadcast: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self._count += 1
            if self._count < FATAL:
                return broadcast(*arguments)
            if self._count == FATAL:
                before = bytes_written()
                sending = broadcast(*arguments) if self._within else None
                while sending and not sending.is_completed() and bytes_written() - before < LEFT:
                    pass
                os.kill(os.getpid(), self._number)
            threading.Event().wait()

        return counted


def bytes_written() -> int:
    """By this process, to sockets too."""
    return int(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])


def main(model_path: str, dtype: str, bucket_bytes: str, number: str, moment: str) -> None:
    gloo = dist.ProcessGroupGloo
    gloo.broadcast = Doom(signal.Signals(int(number)), moment).over(gloo.broadcast)  # type: ignore[method-assign]
    model = load_model(Path(model_path), dtype)
    nowhere = Path("/nowhere")
    writer = make_writer(TransportKind.COLLECTIVE, run_id="doomed", directory=nowhere, bucket_bytes=int(bucket_bytes))
    say("READY")
    for line in sys.stdin:
        version, incarnation = map(int, line.split())
        manifest = writer.write(version, incarnation, iter(perturbed(model, version).items()))
        say(manifest.model_dump_json())


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
