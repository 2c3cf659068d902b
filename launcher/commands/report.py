"""``areal-like report``: how a run ended, what is there of it, and its figures. Reads its folder; starts nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from areal_like.config.paths import RunPaths
from areal_like.observe.progress import closing_table
from launcher.ending import newest_kept, told_ending
from launcher.plan import pairs

#: columns where the output is no terminal
_FILE_WIDTH = 140


def run(arguments: argparse.Namespace) -> int:
    paths = RunPaths(root=Path(arguments.run_folder).absolute())
    ending = told_ending(paths)
    summary = ending.summary
    first = {"ended": ending.how, **ending.details, "checkpoint": newest_kept(paths.root)}
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    title = str(paths.root)
    table = closing_table(summary, title=title, first=first) if summary is not None else pairs(title, first)
    console.print(table)
    return 0
