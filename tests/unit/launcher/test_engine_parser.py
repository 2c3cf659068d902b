"""An engine's own parser, asked in a process of its own: here engines that are small programs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from areal_like.errors import ConfigError
from areal_like.inference.backends.base import EngineCommand
from launcher.engine_parser import parse_only

ENGINE = """
import argparse, neighbour

class Flexible(argparse.ArgumentParser):
    def parse_args(self, args=None, namespace=None):
        return super().parse_args(args, namespace)

argparse.ArgumentParser().parse_args([])  # another parser, of something that it imports
parser = Flexible(prog="server")
parser.add_argument("--model")
parser.add_argument("--block-size", type=int, choices=(8, 16))
parser.parse_args()
open("served", "w").close()
"""


@pytest.fixture(params=["module", "script"])
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """How the engine is started, by its module's name or by its path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "small_engine.py").write_text(ENGINE)
    (tmp_path / "elsewhere" / "neighbour.py").write_text("")
    if request.param == "script":
        return (sys.executable, str(tmp_path / "elsewhere" / "small_engine.py"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    return (sys.executable, "-m", "small_engine")


def ask(*arguments: str) -> None:
    parse_only(EngineCommand(arguments=arguments, environment={}), key="vllm", who="vllm 9.9 at here")


def test_flags_that_it_knows_are_read_and_nothing_is_served(engine: tuple[str, ...], tmp_path: Path) -> None:
    ask(*engine, "--model", "m", "--block-size", "16")
    assert not (tmp_path / "served").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--block-sise", "16"), "unrecognized arguments: --block-sise 16"),
        (("--block-siz", "16"), "unrecognized arguments: --block-siz 16"),  # a server would take it
        (("--block-siz=16",), "unrecognized arguments: --block-siz=16"),
        (("--block-size", "big"), "argument --block-size: invalid int value: 'big'"),
        (("--block-size", "9"), "argument --block-size: invalid choice: 9"),
        (("--block-size",), "argument --block-size: expected one argument"),
    ],
)
def test_what_it_refuses_is_told_in_its_words(
    engine: tuple[str, ...], flags: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"^vllm: vllm 9\.9 at here refuses its flags: {said}"):
        ask(*engine, "--model", "m", *flags)
    assert not (tmp_path / "served").exists()


@pytest.mark.parametrize("program", ["import no_such_engine", "import sys; sys.exit(2)", "x = 1"])
def test_an_engine_that_does_not_come_to_parse_is_told_with_its_last_words(tmp_path: Path, program: str) -> None:
    (tmp_path / "engine.py").write_text(program)
    with pytest.raises(ConfigError, match=r"^rollout\.python: .* before it had read its flags"):
        ask(sys.executable, str(tmp_path / "engine.py"), "--model", "m")
