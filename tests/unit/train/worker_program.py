"""One train worker as its own process: the spec comes as JSON on stdin, the address goes to stdout."""

import sys

from areal_like.train.spec import TrainWorkerSpec
from areal_like.train.worker import run_worker


def announce(address: str) -> None:
    sys.stdout.write(address + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    run_worker(TrainWorkerSpec.model_validate_json(sys.stdin.read()), announce)
