"""``areal-like plan``: print what a run would do. Starts nothing, and needs neither model nor data to be there."""

from __future__ import annotations

import argparse

from rich.console import Console

from areal_like.config.load import load_config
from areal_like.errors import ConfigError
from areal_like.rollout.datasets import read_jsonl
from launcher.devices import this_machine
from launcher.plan import render_plan

#: columns where the output is no terminal: tables in a file should not be cut
_FILE_WIDTH = 140


def run(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.experiment, arguments.overrides)
    try:
        rows = len(read_jsonl(config.train_dataset.path))
    except ConfigError:
        rows = None  # `check` reports it; a plan can be read before the data is made
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    console.print(render_plan(config, this_machine(), rows))
    return 0
