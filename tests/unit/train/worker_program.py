"""One train worker as its own process: the spec comes as JSON on stdin, the address goes to stdout.

Usage: worker_program.py SECONDS_OF_GRACE
"""

import sys

from areal_like.train import worker
from areal_like.train.spec import TrainWorkerSpec


def announce(address: str) -> None:
    sys.stdout.write(address + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    worker.STOP_GRACE = float(sys.argv[1])
    worker.run_worker(TrainWorkerSpec.model_validate_json(sys.stdin.read()), announce)
