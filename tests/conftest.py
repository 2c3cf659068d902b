"""What tests of whole runs share: ``launched.py``, and a folder to start runs in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny_guess(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guessing game's model and data, small and hardly warmed up: 20 rows to train on, 20 to evaluate."""
    from launcher.tiny_models import GuessSettings, TinyLlama, build_guess

    folder = tmp_path_factory.mktemp("tiny") / "guess"
    size = TinyLlama(hidden=64)
    build_guess(folder, 1, GuessSettings(size=size, numbers=5, turns=3, warm_steps=40, train_copies=4, test_copies=4))
    return folder


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, tiny_guess: Path) -> Iterator[object]:
    """A :class:`launched.Workspace`; runs that a failed test left are ended with it."""
    from launched import open_workspace

    with open_workspace(tmp_path_factory.mktemp("runs"), tiny_guess) as opened:
        yield opened
