"""``areal-like serve``: one inference server of an experiment in the foreground, until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import secrets
from pathlib import Path

from areal_like.config.load import load_config
from areal_like.inference.spec import InferenceServerSpec
from areal_like.observe.logs import setup_logging
from launcher.checks import check_backend, check_ports
from launcher.child import TOKEN_VARIABLE
from launcher.devices import this_machine
from launcher.environment import thread_environment
from launcher.model_files import inspect_model
from launcher.processes import INFERENCE, plan_processes


def run(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.experiment, arguments.overrides)
    machine = this_machine()
    check_backend(config, machine)
    inspect_model(Path(config.model.path))
    check_ports(config.rollout.host, config.rollout.port, 1)
    planned = next(p for p in plan_processes(config, machine) if p.role == INFERENCE)
    spec = InferenceServerSpec(
        name=planned.name,
        model_path=config.model.path,
        dtype=config.model.dtype,
        attn_implementation=config.model.attn_implementation,
        device=planned.device,
        host=config.rollout.host,
        port=config.rollout.port,
        threads=config.rollout.threads,
        max_batch_size=config.rollout.max_batch_size,
        context_length=config.rollout.context_length,
        seed=config.seed,
    )
    setup_logging(spec.name)
    os.environ.update(thread_environment(spec.threads))  # before torch is imported, which reads it once
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(32)

    def announce(address: str) -> None:
        print(f"serving {config.model.path} at {address}", flush=True)
        if TOKEN_VARIABLE not in os.environ:
            print(f"send the header  Authorization: Bearer {token}", flush=True)

    from areal_like.inference.embedded.server import run_server

    run_server(spec, token, announce)
    return 0
