"""``areal-like check``: every fault that can be found without starting a process."""

from __future__ import annotations

import argparse

from areal_like.config.experiment import ExperimentConfig
from areal_like.config.load import load_config
from areal_like.config.paths import RunPaths
from areal_like.errors import ConfigError
from launcher.checks import check_experiment
from launcher.devices import this_machine
from launcher.engine_parser import check_with_engine
from launcher.run_directory import check_run_directory


def _earlier_run(config: ExperimentConfig, *, force: bool) -> list[str]:
    """What `run` would refuse in the run's folder: no fault of the experiment, so a warning here."""
    try:
        check_run_directory(RunPaths.of(config), force=force)
    except ConfigError as error:
        return [str(error)]
    return []


def run(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.experiment, arguments.overrides)
    report = check_experiment(config, force=True)
    for warning in [*report.warnings, *_earlier_run(config, force=arguments.force)]:
        print(f"warning: {warning}")
    read_by = check_with_engine(config, this_machine()) if arguments.engine else None
    if arguments.engine:
        print(
            f"flags: read by {read_by}" if read_by else "flags: none, as no server of an engine of its own is started"
        )
    valid = f", {report.valid_rows} validation" if config.valid_dataset is not None else ""
    context = "" if report.model.context_length is None else f", context of {report.model.context_length} tokens"
    print(
        f"{arguments.experiment}: ok ({report.train_rows} training{valid} prompts, "
        f"{report.model.weight_bytes / 1e6:.1f} MB of weights{context})"
    )
    return 0
