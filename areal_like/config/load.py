"""From a YAML file and dotted overrides to a validated experiment, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from areal_like.config.experiment import ExperimentConfig
from areal_like.config.faults import describe_faults
from areal_like.config.overrides import apply_overrides, parse_override
from areal_like.config.yaml_text import YamlDocument, read_yaml
from areal_like.errors import ConfigError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Read an experiment file, apply ``key=value`` overrides, and check every rule that needs no disk or network.

    Raises:
        ConfigError: the file is missing or no YAML, a key is unknown, or values break rules; one message names
            every fault with its dotted key, its line, the rule and the value.
    """
    document = read_yaml(Path(path))
    parsed = [parse_override(text, ExperimentConfig) for text in overrides]
    tree = apply_overrides(document.tree, parsed)
    overridden = {override.path for override in parsed}
    lines = {key: line for key, line in document.lines.items() if key not in overridden}
    return _validate(YamlDocument(source=document.source, tree=tree, lines=lines))


def config_from_mapping(tree: Mapping[str, Any], *, source: str = "config") -> ExperimentConfig:
    """Validate an experiment given as a mapping, with the messages of :func:`load_config`.

    Raises:
        ConfigError: a key is unknown or a value breaks a rule.
    """
    return _validate(YamlDocument(source=source, tree=dict(tree)))


def dump_resolved(config: ExperimentConfig) -> str:
    """The whole experiment as YAML, defaults included; :func:`load_config` reads it back unchanged."""
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)
    return text


def _validate(document: YamlDocument) -> ExperimentConfig:
    try:
        text = json.dumps(document.tree)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{document.source}: holds a value that is no text, number, list or mapping: {error}"
        ) from None
    try:
        # strict JSON: "8" is no number and true is no 1, while enums, tuples and whole floats still read naturally
        return ExperimentConfig.model_validate_json(text, strict=True)
    except ValidationError as error:
        faults = describe_faults(error, ExperimentConfig, document.lines)
    if len(faults) == 1:
        raise ConfigError(f"{document.source}: {faults[0]}")
    listed = "\n".join(f"  {fault}" for fault in faults)
    raise ConfigError(f"{document.source}: {len(faults)} faults\n{listed}")
