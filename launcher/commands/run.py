"""``areal-like run``: check everything, hold the run's folder, then train."""

from __future__ import annotations

import argparse
import sys

from areal_like.config.load import dump_resolved, load_config
from areal_like.config.paths import RunPaths
from areal_like.observe.disk import writing
from launcher.checks import check_experiment
from launcher.environment import quiet_own_threads
from launcher.leftovers import new_run_id
from launcher.run_directory import claim_run_directory


def run(arguments: argparse.Namespace) -> int:
    quiet_own_threads()
    config = load_config(arguments.experiment, arguments.overrides)
    report = check_experiment(config, force=arguments.force)
    for warning in report.warnings:
        print(f"areal-like: warning: {warning}", file=sys.stderr)
    paths, run_id = RunPaths.of(config), new_run_id()
    with claim_run_directory(paths, run_id=run_id, force=arguments.force) as moved:
        if moved is not None:
            print(f"areal-like: the earlier run is now in {moved}", file=sys.stderr)
        with writing(paths.resolved_config):
            paths.resolved_config.write_text(dump_resolved(config), encoding="utf-8")
        from launcher.run import run_experiment

        return run_experiment(config, paths=paths, run_id=run_id, live=False if arguments.plain else None)
