"""``areal-like export``: copy a run's Hugging Face checkpoint to where it will be used."""

from __future__ import annotations

import argparse
from pathlib import Path

from launcher.checkpoints import checkpoint_of, copy_checkpoint, newest_checkpoint


def run(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.run_folder)
    version = arguments.checkpoint
    source = newest_checkpoint(folder) if version is None else checkpoint_of(folder, version)
    target = Path(arguments.target)
    copied = copy_checkpoint(source, target)
    print(f"{source} -> {target} ({copied / 1e6:.1f} MB)")
    return 0
