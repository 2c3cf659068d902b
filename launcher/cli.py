"""``areal-like run|plan|check|serve|eval|doctor|export|report``: what can be asked, and how errors are told.

Parsing imports nothing heavy; a command's module is imported when it is run.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

import areal_like
from areal_like.errors import ArealLikeError, ConfigError

#: something in the experiment, a file or the command line is wrong; nothing was started
EXIT_BAD_INPUT = 2
#: the run began and failed
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

#: command -> (module under launcher.commands, help)
_COMMANDS = {
    "run": ("run", "train: start every process of an experiment and see it through"),
    "plan": ("plan", "print processes, devices, batch arithmetic and what η allows; start nothing"),
    "check": ("check", "look for faults: keys, model, data, user code, ports; start nothing"),
    "serve": ("serve", "one inference server in the foreground"),
    "eval": ("evaluate", "evaluate a checkpoint on the validation set"),
    "doctor": ("doctor", "print what this machine and its environments can run; start nothing"),
    "export": ("export", "copy a run's Hugging Face checkpoint"),
    "report": ("report", "say how a run ended, and what is there of it"),
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="areal-like", description="Asynchronous reinforcement learning of language models."
    )
    parser.add_argument("--version", action="version", version=f"areal-like {areal_like.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(_COMMANDS))
    for name, (module, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.set_defaults(module=module)
        if name == "export":
            command.add_argument("run_folder", help="runs/<experiment>/<trial>")
            command.add_argument("target", help="folder to write; must not exist or be empty")
            command.add_argument("--checkpoint", metavar="N", type=int, help="version to copy (default: the newest)")
            continue
        if name == "report":
            command.add_argument("run_folder", help="runs/<experiment>/<trial>")
            continue
        if name == "doctor":
            command.add_argument("experiment", nargs="?", help="look for this experiment's engine, too")
            continue
        command.add_argument("experiment", help="the experiment's YAML file")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="as in actor.optimizer.lr=1e-4")
        if name in ("run", "check"):
            command.add_argument("--force", action="store_true", help="move an earlier run of this name aside")
        if name == "check":
            engine = "let the engine's own parser read its flags, too (seconds; starts no server)"
            command.add_argument("--engine", action="store_true", help=engine)
        if name in ("run", "eval"):
            command.add_argument("--plain", action="store_true", help="progress as lines, not as a live bar")
        if name == "eval":
            command.add_argument("--checkpoint", metavar="FOLDER", help="a Hugging Face folder (default: the newest)")
    return parser


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. Options may stand between overrides, which argparse alone does not allow."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    strange = [text for text in rest if text.startswith("-") or "=" not in text]
    if strange or (rest and not hasattr(arguments, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(strange or rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit status. Expected errors become one message on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without η in its encoding is no reason to fail
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    try:
        command = importlib.import_module(f"launcher.commands.{arguments.module}")
        status: int = command.run(arguments)
        sys.stdout.flush()
        return status
    except ConfigError as error:
        return _fail(error, EXIT_BAD_INPUT)
    except ArealLikeError as error:
        return _fail(error, EXIT_FAILED)
    except KeyboardInterrupt:
        print("areal-like: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `areal-like plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:  # a full disk, most often: wherever it was met, there is nothing to debug in our code
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", EXIT_FAILED)


def _fail(error: Exception | str, status: int) -> int:
    print(f"areal-like: error: {error}", file=sys.stderr)
    return status
