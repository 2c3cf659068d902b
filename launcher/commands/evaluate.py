"""``areal-like eval``: evaluate a checkpoint on the validation set of its experiment."""

from __future__ import annotations

import argparse
import sys

from areal_like.config.load import load_config
from areal_like.config.paths import RunPaths
from areal_like.errors import ConfigError
from launcher.checkpoints import newest_checkpoint
from launcher.checks import check_experiment
from launcher.environment import quiet_own_threads
from launcher.leftovers import new_run_id


def run(arguments: argparse.Namespace) -> int:
    quiet_own_threads()
    config = load_config(arguments.experiment, arguments.overrides)
    if config.valid_dataset is None:
        raise ConfigError(f"{arguments.experiment}: valid_dataset: is required to evaluate; name a JSONL file")
    checkpoint = arguments.checkpoint or str(newest_checkpoint(RunPaths.of(config).root))
    config = load_config(arguments.experiment, [*arguments.overrides, f"model.path={checkpoint}"])
    for warning in check_experiment(config, run_directory=False).warnings:
        print(f"areal-like: warning: {warning}", file=sys.stderr)
    from launcher.run import evaluate_checkpoint

    return evaluate_checkpoint(config, run_id=new_run_id(), live=False if arguments.plain else None)
