"""What a benchmark cannot do as it was asked, told in one sentence before anything starts.

Each ends the command with exit status 2 (``SystemExit``) where its rule is broken.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from areal_like.config.experiment import ExperimentConfig
from areal_like.config.load import load_config
from areal_like.errors import ConfigError
from benchmarks.demo_runs import ROOT


def check_limits(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """There is time (``--seconds``), and a place for the result (``--out``)."""
    if not 0 < given.seconds < math.inf:
        parser.error(f"--seconds {given.seconds:g}: a number above 0 is needed")
    check_out(parser, given.out)


def check_out(parser: argparse.ArgumentParser, out: Path | None) -> None:
    """A file can be written there; its folders may be missing. Nothing is left behind by the try."""
    if out is None:
        return
    if out.is_dir():
        parser.error(f"--out {out}: that is a folder; name a file")
    try:
        if out.exists():
            out.open("ab").close()
        else:
            _try_folder(next(folder for folder in out.absolute().parents if folder.exists()))
    except OSError as error:
        parser.error(f"--out {out}: it cannot be written: {error.strerror}")


def check_folder(parser: argparse.ArgumentParser, option: str, folder: Path) -> None:
    """It is there, and files can be made in it."""
    try:
        _try_folder(folder)
    except OSError as error:
        parser.error(f"{option} {folder}: no files can be made there: {error.strerror}")


def _try_folder(folder: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=folder):
        pass


def check_counts(parser: argparse.ArgumentParser, option: str, given: Sequence[int], *, least: int) -> None:
    """Different whole numbers from ``least`` up."""
    if len(set(given)) < len(given) or min(given, default=least) < least:
        needed = f"different numbers from {least} up are" if len(given) > 1 else f"a number from {least} up is"
        parser.error(f"{option} {' '.join(map(str, given))}: {needed} needed")


def check_model(parser: argparse.ArgumentParser, folder: Path) -> None:
    """There is a model. A relative path begins at the repository's root, as in the runs."""
    if not (ROOT / folder / "config.json").is_file():
        parser.error(f"--smollm2 {folder}: no config.json is there; make smollm2 makes models/smollm2")


def check_experiment(parser: argparse.ArgumentParser, config: str, overrides: Sequence[str]) -> ExperimentConfig:
    """The experiment file with these overrides, which it knows and which break none of its rules."""
    try:
        return load_config(ROOT / config, overrides)
    except ConfigError as error:
        parser.error(" ".join(str(error).split()))
