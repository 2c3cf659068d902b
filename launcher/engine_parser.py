"""What an engine's own parser says of its flags: a process in the engine's environment that parses, and serves nothing.

The server's whole command is run, up to the moment in which it has parsed its command line. That takes as long as the
engine needs to import itself (5 to 15 seconds), so it is done when it is asked for: ``areal-like check --engine``.
A server takes a flag's beginning for the flag, as argparse does; here that is refused, for it is a misspelling.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from areal_like.config.experiment import ExperimentConfig
from areal_like.errors import ConfigError
from areal_like.inference.backends import ENGINES, get_engine
from areal_like.inference.backends.base import EngineCommand
from launcher.devices import Machine
from launcher.engines import engine_spec
from launcher.log_text import readable_lines
from launcher.processes import INFERENCE, plan_processes

#: seconds an engine may take to import itself, on a slow machine for the first time
_TIMEOUT = 300.0
#: exit status of a parser that refuses its command line (argparse)
_REFUSED = 2
#: exit status that says: the command line was parsed. None of Python's own.
_PARSED = 77
#: lines of what a broken engine says that are shown
_LAST_LINES = 5
_PARSE_ONLY = f"""
import argparse, os, runpy, sys
whole = argparse.ArgumentParser.parse_args
def parse(self, *arguments, **named):
    servers = bool({{"--model", "--model-path"}} & set(self._option_string_actions))
    self.allow_abbrev = self.allow_abbrev and not servers  # a misspelt flag may be the beginning of another
    found = whole(self, *arguments, **named)
    if servers:
        os._exit({_PARSED})
    return found
argparse.ArgumentParser.parse_args = parse
sys.argv = sys.argv[1:]
if sys.argv[0] == "-m":
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def check_with_engine(config: ExperimentConfig, machine: Machine) -> str | None:
    """Let the engine's own parser read what its first server would be started with.

    Returns:
        Who read it; None where there is nothing to read: the embedded engine has no flags, servers of others theirs.

    Raises:
        ConfigError: it refuses a flag or a value, in its own words, or its environment is broken.
    """
    name = config.rollout.spec.name
    if name not in ENGINES or config.rollout.servers:
        return None
    planned = next(process for process in plan_processes(config, machine) if process.role == INFERENCE)
    spec = engine_spec(config, planned)
    who = f"{name} {spec.version} at {spec.python}"
    parse_only(get_engine(name).command(spec, token="not-used"), key=name, who=who)
    return who


def parse_only(command: EngineCommand, *, key: str, who: str) -> None:
    """Run ``command`` until it has parsed its command line. ``key`` is the section that holds the flags.

    Raises:
        ConfigError: it refuses the command line, or does not come to parse it.
    """
    python, *rest = command.arguments
    try:
        ended = subprocess.run(
            [python, "-c", _PARSE_ONLY, *rest],
            env={**os.environ, **command.environment},
            cwd=Path.cwd(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"rollout.python: {who} has not read its flags within {_TIMEOUT:g} s") from None
    if ended.returncode == _PARSED:
        return
    if ended.returncode == _REFUSED and (found := re.findall(r"^.*?: error: (.+)$", ended.stderr, re.MULTILINE)):
        raise ConfigError(f"{key}: {who} refuses its flags: {found[-1]}")
    shown = "\n".join(f"  | {line}" for line in readable_lines(ended.stderr)[-_LAST_LINES:])
    raise ConfigError(
        f"rollout.python: {who} ended with status {ended.returncode} before it had read its flags:\n{shown}"
    )
