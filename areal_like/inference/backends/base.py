"""What an engine's adapter must offer, and what its version can do."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from areal_like.api.weights import InterruptMode, TransportKind
from areal_like.client.control import ServerControl
from areal_like.client.dialect import Dialect
from areal_like.errors import ConfigError
from areal_like.inference.spec import EngineSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What one version of an engine can do for us.

    Attributes:
        engine: its name as people write it.
        version: what was found; empty where it could not be told.
        interrupts: what a commit can do to requests in flight.
        transports: how weights can reach it.
        spans: it reports which version wrote each token; without, versions come from the client's segments.
        seeds: what a seeded answer promises, as a clause ("repeats exactly").
        memory: where and with which flag its servers can release device memory; empty where they cannot.
        since: for what this version lacks, the version that has it: ``interrupt=keep`` -> ``0.32``.
    """

    engine: str
    version: str
    interrupts: frozenset[InterruptMode]
    transports: frozenset[TransportKind]
    spans: bool
    seeds: str
    memory: str = ""
    since: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCommand:
    """How an engine's server is started, and the path that answers 200 once it serves."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    health_path: str = "/health"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """What an adapter needs to know of the experiment to talk to a server.

    Attributes:
        token: bearer token of the run's servers.
        version: the version that the server said it has.
        transport: how weights reach them.
        timeout: seconds that a small control call may take.
        attached: somebody else started the server, under a name of theirs.
    """

    token: str = field(repr=False)
    version: str
    transport: TransportKind
    timeout: float = 60.0
    attached: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLink:
    """The two ways to talk to one server. They may share what they know of its version."""

    control: ServerControl
    dialect: Dialect


class Backend(Protocol):
    """One engine, for a controller that talks to its servers."""

    @property
    def name(self) -> str:
        """As in ``rollout.backend``."""
        ...

    def capabilities(self, version: str) -> Capabilities:
        """What that version can do. Pure.

        Raises:
            ConfigError: it is too old to be used at all; the message names the oldest that can.
        """
        ...

    async def version(self, url: str, *, token: str, timeout: float) -> str:
        """The version that a running server has.

        Raises:
            ServerUnavailable: it does not answer in time.
            RequestError: it asks for another token.
        """
        ...

    def connect(self, name: str, url: str, settings: LinkSettings) -> ServerLink:
        """Talk to a server that answers. Makes no call; the control is closed by whoever gets it."""
        ...


class EngineBackend(Backend, Protocol):
    """An engine that is a program of its own."""

    @property
    def package(self) -> tuple[str, ...]:
        """Names under which its distribution may be installed."""
        ...

    @property
    def needs_us(self) -> bool:
        """This package must be installed in its environment, too."""
        ...

    @property
    def least_temperature(self) -> float:
        """Positive temperatures below this one are not sampled with as they are."""
        ...

    def check_interrupt(self, mode: InterruptMode, flags: Mapping[str, Any]) -> None:
        """Raise ConfigError where a server with these flags cannot tell versions exactly under ``mode``."""
        ...

    def command(self, spec: EngineSpec, *, token: str) -> EngineCommand:
        """How to start one server.

        Raises:
            ConfigError: a flag contradicts what the contract needs.
        """
        ...


def require(found: Capabilities, *, interrupt: InterruptMode, transport: TransportKind, where: str) -> None:
    """Raise unless ``found`` can do what the experiment asks.

    Raises:
        ConfigError: names the key, the version found at ``where``, and the version needed.
    """
    for key, asked, offered in (
        ("rollout.interrupt", interrupt, frozenset(map(str, found.interrupts))),
        ("weights.transport", transport, frozenset(map(str, found.transports))),
    ):
        if str(asked) not in offered:
            needed = found.since.get(f"{key.rpartition('.')[2]}={asked}")
            advice = f"it needs {found.engine} >= {needed}" if needed else f"{found.engine} has no such way"
            raise ConfigError(
                f"{key}: {str(asked)!r} was asked for, {where} has {found.engine} {found.version or '(unknown)'}: "
                f"{advice}; use {' or '.join(sorted(offered)) or 'another engine'}"
            )


def version_tuple(version: str) -> tuple[int, int, int]:
    """``0.32.0+cpu`` -> (0, 32, 0); parts that are missing count as 0. Development versions count as their release.

    Raises:
        ConfigError: no number at its start.
    """
    found = re.match(r"v?(\d+)(?:\.(\d+))?(?:\.(\d+))?", version)
    if not found:
        raise ConfigError(f"{version!r} is no version number")
    major, minor, patch = (int(part or 0) for part in found.groups())
    return major, minor, patch


def visible_gpus(devices: Sequence[str]) -> str:
    """``CUDA_VISIBLE_DEVICES`` of a server on ``devices``: ``cuda:1`` is the second GPU that we see ourselves.

    We may have been given some of the machine's GPUs only; a child's variable replaces ours and counts all of them.
    """
    ours = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    numbers = [int(device.partition(":")[2] or 0) for device in devices]
    return ",".join(ours[number] if number < len(ours) else str(number) for number in numbers)


#: a flag's name; a "=" in it would bring a value along
_FLAG_NAME = re.compile(r"[A-Za-z0-9_.+-]+")
#: flags of both engines that name a file of flags
_MORE_FLAGS = frozenset({"config"})


def plain_flag(given: str) -> str:
    """A flag's name as our tables have it: ``max-num-seqs`` -> ``max_num_seqs``."""
    return given.replace("-", "_").lstrip("_")


def check_flag_names(section: str, flags: Iterable[str], *, ours: Iterable[str], whole: Collection[str] = ()) -> None:
    """Raise for a flag that the engine's parser would read as one of ``ours``, and our own rules would not.

    argparse takes a flag's beginning for the flag (``max_num_seq`` for ``max_num_seqs``), engines take parts of a
    mapping one by one (``weight_transfer_config.backend``), and more flags out of a file (``config``).

    Args:
        section: the section of the experiment that holds the flags, for messages.
        ours: flags that we set or check ourselves, with underscores.
        whole: flags of the engine that are the beginning of one of ours.

    Raises:
        ConfigError: names the flag in full.
    """
    names = sorted({form for name in ours for form in (name, f"no_{name}")})
    for given in flags:
        name, dotted, _ = plain_flag(given).partition(".")
        if not _FLAG_NAME.fullmatch(given) or not name:
            raise ConfigError(f"{section}.{given}: is no flag's name; write it as name: value")
        if name in _MORE_FLAGS:
            raise ConfigError(f"{section}.{given}: flags in a file of the engine's are not checked; name them here")
        if dotted and name in names:
            raise ConfigError(f"{section}.{given}: is a part of {name}; write {section}.{name} as one mapping")
        meant = [full for full in names if full != name and full.startswith(name)]
        if meant and name not in names and name not in whole:
            raise ConfigError(
                f"{section}.{given}: is no flag of its own: the engine would take it for the beginning of "
                f"{' or '.join(meant)}; write the flag in full"
            )


def flag_arguments(flags: Mapping[str, object]) -> tuple[str, ...]:
    """Command-line words of a flags section: ``max_model_len: 512`` -> ``--max-model-len 512``.

    True is the bare flag, False its ``--no-`` form, None leaves it out; a mapping becomes JSON, a list several words.
    """
    words: list[str] = []
    for name, value in flags.items():
        flag = name.replace("_", "-").lstrip("-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, Mapping):
            words += [f"--{flag}", json.dumps(value, separators=(",", ":"))]
        elif isinstance(value, (list, tuple)):
            words += [f"--{flag}", *map(str, value)]
        else:
            words += [f"--{flag}", str(value)]
    return tuple(words)
