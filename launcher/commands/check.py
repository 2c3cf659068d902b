"""``areal-like check``: every fault that can be found without starting a process."""

from __future__ import annotations

import argparse

from areal_like.config.load import load_config
from launcher.checks import check_experiment


def run(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.experiment, arguments.overrides)
    report = check_experiment(config, force=arguments.force)
    for warning in report.warnings:
        print(f"warning: {warning}")
    valid = f", {report.valid_rows} validation" if config.valid_dataset is not None else ""
    context = "" if report.model.context_length is None else f", context of {report.model.context_length} tokens"
    print(
        f"{arguments.experiment}: ok ({report.train_rows} training{valid} prompts, "
        f"{report.model.weight_bytes / 1e6:.1f} MB of weights{context})"
    )
    return 0
