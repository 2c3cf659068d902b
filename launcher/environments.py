"""Python environments besides our own: is an engine installed there, and in which version."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from areal_like.errors import ConfigError

#: seconds an interpreter may take to name a version; nothing heavy is imported
_TIMEOUT = 60.0
_QUESTION = """
import importlib.metadata, sys
for name in sys.argv[1:]:
    try:
        print(importlib.metadata.version(name))
        break
    except importlib.metadata.PackageNotFoundError:
        pass
"""


def suggested_python(name: str, device: str) -> str:
    """In words: an interpreter for the engine ``name``, and what makes it. ``device``: auto, cpu or cuda."""
    if device == "cuda":
        return f'.venv-{name}-gpu/bin/python, made as docs/engines.md ("On GPUs") says'
    for_gpus = "" if device == "cpu" else ' for CPUs, or one made as docs/engines.md ("On GPUs") says'
    return f".venv-{name}/bin/python, which `make engines` makes{for_gpus}"


def installed_version(
    python: str, packages: Sequence[str], *, suggested: str = ".venv-vllm/bin/python or .venv-sglang/bin/python"
) -> str:
    """The version of the first of ``packages`` that is installed in the environment of ``python``; empty if none is.

    What ``PYTHONPATH`` adds counts, since a server that we start has it, too; the folder we happen to be in does not.

    Args:
        suggested: what to name in its place, should it be none.

    Raises:
        ConfigError: ``python`` is no interpreter that answers.
    """
    try:
        answer = subprocess.run(
            [python, "-c", _QUESTION, *packages],
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = error.strerror if isinstance(error, OSError) else f"no answer within {_TIMEOUT:g} s"
        raise ConfigError(
            f"rollout.python: {python} cannot be asked for versions: {why}; it must be the interpreter of the engine's "
            f"environment, such as {suggested}"
        ) from error
    if answer.returncode != 0:
        raise ConfigError(f"rollout.python: {python} is no usable interpreter: {answer.stderr.strip()[-300:]}")
    return answer.stdout.strip()
