"""``areal-like serve``: one inference server of an experiment in the foreground, until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import secrets
from pathlib import Path

from areal_like.config.load import load_config
from areal_like.errors import ConfigError
from areal_like.inference.spec import EngineSpec, InferenceServerSpec
from areal_like.observe.logs import setup_logging
from launcher.checks import check_backend, check_ports
from launcher.child import TOKEN_VARIABLE
from launcher.devices import this_machine
from launcher.engine_process import run_engine
from launcher.engines import server_part
from launcher.environment import thread_environment
from launcher.gpu_checks import check_gpus
from launcher.model_files import inspect_model
from launcher.processes import INFERENCE, ROLLOUT, plan_processes
from launcher.roles import ENGINE


def run(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.experiment, arguments.overrides)
    if config.rollout.servers:
        raise ConfigError("rollout.servers: names servers that are there already, and serve starts one; remove it")
    machine = this_machine()
    check_gpus(config, machine, sections=(ROLLOUT,))
    check_backend(config, machine)
    inspect_model(Path(config.model.path))
    check_ports(config.rollout.host, config.rollout.port, 1)
    planned = next(p for p in plan_processes(config, machine) if p.role == INFERENCE)
    part = server_part(config, planned)
    setup_logging(planned.name)
    os.environ.update(thread_environment(planned.threads))  # before torch is imported, which reads it once
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(32)

    def announce(address: str) -> None:
        print(f"serving {config.model.path} at {address}", flush=True)
        if not os.environ.get(TOKEN_VARIABLE):
            print(f"send the header  Authorization: Bearer {token}", flush=True)

    if part.entry == ENGINE:
        run_engine(EngineSpec.model_validate_json(part.spec), token, announce)
        return 0
    from areal_like.inference.embedded.server import run_server

    run_server(InferenceServerSpec.model_validate_json(part.spec), token, announce)
    return 0
