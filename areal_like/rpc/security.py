"""Who may talk to our sockets: CURVE keys for ``tcp://``, private socket files for ``ipc://``."""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import zmq
from zmq.auth.thread import ThreadAuthenticator

from areal_like.errors import ConfigError

#: Linux keeps a socket's path in 108 bytes, the last of which is a zero
MAX_IPC_PATH_BYTES = 107


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKeys:
    """CURVE key pairs of one run (Z85 text). Whoever holds them belongs to the run; they are made anew for each."""

    server_public: str
    server_secret: str = field(repr=False)
    client_public: str
    client_secret: str = field(repr=False)

    @classmethod
    def generate(cls) -> Self:
        server_public, server_secret = (key.decode() for key in zmq.curve_keypair())
        client_public, client_secret = (key.decode() for key in zmq.curve_keypair())
        return cls(
            server_public=server_public,
            server_secret=server_secret,
            client_public=client_public,
            client_secret=client_secret,
        )


class _OnlyKey:
    """ZAP's question whether a client's CURVE key is welcome."""

    def __init__(self, public: str) -> None:
        self._public = public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


def private_socket_dir() -> Path:
    """A new folder of mode 0700 with a path short enough for sockets. The caller removes it."""
    return Path(tempfile.mkdtemp(prefix="areal-"))


def bind(socket: zmq.Socket[Any], address: str, keys: RunKeys | None) -> tuple[str, ThreadAuthenticator | None]:
    """Bind ``socket`` so that only this run can connect.

    Returns:
        the address to connect to (random port resolved), and the authenticator to stop after the socket is closed.

    Raises:
        ConfigError: the scheme is neither ipc nor tcp, tcp without keys, a path too long, or a folder others can enter.
    """
    if address.startswith("ipc://"):
        path = Path(address.removeprefix("ipc://"))
        _check_socket_path(path)
        _bind_or_explain(socket, address)
        path.chmod(0o600)
        return address, None
    if not address.startswith("tcp://"):
        raise ConfigError(f"cannot bind to {address!r}: sockets are ipc:// (one host) or tcp:// (with keys)")
    if keys is None:
        raise ConfigError(f"cannot bind to {address!r} without CURVE keys: pass RunKeys, or use ipc:// on one host")
    authenticator = ThreadAuthenticator(socket.context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=_OnlyKey(keys.client_public))
    socket.curve_server = True
    socket.curve_secretkey = keys.server_secret.encode()
    socket.curve_publickey = keys.server_public.encode()
    try:
        _bind_or_explain(socket, address)
    except ConfigError:
        authenticator.stop()
        raise
    endpoint = bytes(socket.getsockopt(zmq.LAST_ENDPOINT))
    return endpoint.decode().rstrip("\0"), authenticator


def connect(socket: zmq.Socket[Any], address: str, keys: RunKeys | None) -> None:
    """Connect ``socket`` with the run's keys where the scheme needs them.

    Raises:
        ConfigError: tcp without keys, or a scheme that is neither ipc nor tcp.
    """
    if address.startswith("tcp://"):
        if keys is None:
            raise ConfigError(f"cannot connect to {address!r} without CURVE keys: pass the run's RunKeys")
        socket.curve_serverkey = keys.server_public.encode()
        socket.curve_publickey = keys.client_public.encode()
        socket.curve_secretkey = keys.client_secret.encode()
    elif not address.startswith("ipc://"):
        raise ConfigError(f"cannot connect to {address!r}: sockets are ipc:// (one host) or tcp:// (with keys)")
    socket.connect(address)


def _bind_or_explain(socket: zmq.Socket[Any], address: str) -> None:
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot bind to {address!r}: {error}; choose another address, or port 0 (*)") from error


def _check_socket_path(path: Path) -> None:
    length = len(os.fsencode(path))
    if length > MAX_IPC_PATH_BYTES:
        raise ConfigError(
            f"socket path {path} has {length} bytes, the system allows {MAX_IPC_PATH_BYTES}: "
            f"use a shorter folder, such as one from private_socket_dir()"
        )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = path.parent.stat()
    if folder.st_uid != os.getuid() or stat.S_IMODE(folder.st_mode) & 0o077:
        raise ConfigError(
            f"socket folder {path.parent} has mode {stat.S_IMODE(folder.st_mode):04o} and owner {folder.st_uid}: "
            f"it must be ours alone (0700), so that no other user reaches the socket before it is closed to them"
        )
