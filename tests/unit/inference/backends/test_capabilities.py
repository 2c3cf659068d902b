"""What each version can do, and what is said of what it cannot."""

from __future__ import annotations

import itertools

import pytest

from areal_like.api.weights import InterruptMode, TransportKind
from areal_like.errors import ConfigError
from areal_like.inference.backends import get_backend
from areal_like.inference.backends.base import Capabilities, require

VERSIONS = [
    ("embedded", "0.1.0"),
    *(("vllm", version) for version in ("0.26.0", "0.28.0", "0.31.2", "0.32.0", "0.33.1")),
    *(("sglang", version) for version in ("0.5.19", "0.5.20", "0.5.21", "0.5.23")),
]


@pytest.mark.parametrize(("name", "version"), VERSIONS)
@pytest.mark.parametrize(("mode", "transport"), list(itertools.product(InterruptMode, TransportKind)))
def test_what_is_missing_is_refused_with_the_version_that_has_it(
    name: str, version: str, mode: InterruptMode, transport: TransportKind
) -> None:
    found = get_backend(name).capabilities(version)
    lacks = [f"interrupt={mode}"] * (mode not in found.interrupts)
    lacks += [f"transport={transport}"] * (transport not in found.transports)
    if not lacks:
        require(found, interrupt=mode, transport=transport, where="here")
        return
    needed = found.since.get(lacks[0])
    said = rf"here has {found.engine} {version}.*{'it needs' if needed else 'has no such way'}.*{needed or ''}"
    with pytest.raises(ConfigError, match=said):
        require(found, interrupt=mode, transport=transport, where="here")
    if needed:
        assert has(get_backend(name).capabilities(needed), lacks[0])


def has(found: Capabilities, what: str) -> bool:
    return what in {*(f"interrupt={mode}" for mode in found.interrupts), *(f"transport={t}" for t in found.transports)}


@pytest.mark.parametrize(
    ("name", "version", "interrupts", "spans"),
    [
        ("vllm", "0.26.0", {"recompute", "drain"}, False),
        ("vllm", "0.31.9", {"recompute", "drain"}, False),
        ("vllm", "0.32.0+cpu", {"keep", "recompute", "drain"}, True),
        ("sglang", "0.5.19", {"keep", "recompute", "drain"}, True),
    ],
)
def test_the_tables_of_the_page(name: str, version: str, interrupts: set[str], spans: bool) -> None:
    """``docs/engines.md``."""
    found = get_backend(name).capabilities(version)
    assert (set(found.interrupts), found.spans) == (interrupts, spans)
