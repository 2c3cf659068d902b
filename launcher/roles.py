"""The roles that child processes play: ``python -m launcher.roles <role> <spec file>``.

Every role does the same three things: make sure it does not outlive the controller, start what its spec file says,
and register its address with the controller. Engines and torch are imported only by the role that needs them.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from areal_like.errors import InfrastructureError
from areal_like.observe.logs import setup_logging
from launcher.child import die_with_parent, run_token

INFERENCE = "inference"
#: an inference server that is a program of its own; it registers as ``inference``
ENGINE = "engine"
TRAIN = "train"

#: seconds the controller may take to answer a registration
_REGISTER_TIMEOUT = 60.0


class RoleSpec(BaseModel):
    """What a child is told: where its controller listens, and the spec of its own part as JSON text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: str
    index: int
    controller_address: str
    part: str


def main(arguments: list[str]) -> int:
    """Play one role until it ends; returns the exit status."""
    die_with_parent(signal.SIGTERM if arguments[:1] == [ENGINE] else signal.SIGKILL)
    if len(arguments) != 2 or arguments[0] not in _ROLES:
        sys.stderr.write(f"usage: python -m launcher.roles {{{','.join(_ROLES)}}} <spec file>\n")
        return 2
    spec = RoleSpec.model_validate_json(Path(arguments[1]).read_text(encoding="utf-8"))
    setup_logging(f"{spec.role}-{spec.index}")  # stderr is the role's log file
    _ROLES[arguments[0]](spec)
    return 0


def _registration(spec: RoleSpec) -> Callable[[str], None]:
    """What a role calls with its address once it is ready."""

    def register(address: str) -> None:
        from areal_like.rpc.sync_client import SyncRpcClient

        with SyncRpcClient(spec.controller_address) as controller:
            controller.call(
                "register",
                timeout=_REGISTER_TIMEOUT,
                role=spec.role,
                index=spec.index,
                address=address,
                pid=os.getpid(),
            )

    return register


def _inference(spec: RoleSpec) -> None:
    from areal_like.inference.embedded.server import run_server
    from areal_like.inference.spec import InferenceServerSpec

    run_server(InferenceServerSpec.model_validate_json(spec.part), run_token(), _registration(spec))


def _engine(spec: RoleSpec) -> None:
    """Its failures are told without our traceback: the engine's own last words must be the last lines of the log."""
    from areal_like.inference.spec import EngineSpec
    from launcher.engine_process import run_engine

    try:
        run_engine(EngineSpec.model_validate_json(spec.part), run_token(), _registration(spec))
    except InfrastructureError as error:
        sys.exit(str(error))


def _train(spec: RoleSpec) -> None:
    from areal_like.train.spec import TrainWorkerSpec
    from areal_like.train.worker import run_worker

    run_worker(TrainWorkerSpec.model_validate_json(spec.part), _registration(spec))


_ROLES: dict[str, Callable[[RoleSpec], None]] = {INFERENCE: _inference, ENGINE: _engine, TRAIN: _train}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
