"""Broadcasts between GPUs through torch's own copy of libnccl, without torch's process groups.

Why not ``ProcessGroupNCCL``: its watchdog ends the *process* where a peer died, and a peer that dies inside one host
is never noticed by NCCL itself. Here nothing blocks for good: communicators do not block (``ncclConfig_t.blocking =
0``), every wait looks at a CUDA event and at the clock, and whoever waited too long aborts its own communicator, which
lets its kernels end. A communicator that was aborted is over; its process is not.

https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html#fault-tolerance
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import Protocol

import torch

from areal_like.errors import WeightUpdateError

#: bytes of an ``ncclUniqueId``
ID_BYTES = 128
#: seconds between two looks at something that will come within milliseconds
LOOK = 0.0005
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
#: of ``ncclConfig_t`` up to ``blocking``, which is all we set: the layout of NCCL 2.14
_CONFIG_MAGIC, _CONFIG_VERSION = 0xCAFEBEEF, 21400


class GroupBroken(WeightUpdateError):
    """A member of the group was lost, or made no progress in time; the group is over, and a new one may be formed."""


class Group(Protocol):
    """What a broadcast needs of a group: a communicator, or a stand-in for one."""

    @property
    def broken(self) -> bool:
        """It was aborted or closed."""
        ...

    def broadcast(self, tensor: torch.Tensor, src: int, stream: torch.cuda.Stream | None = None) -> None:
        """Begin to send ``tensor`` from member ``src`` to all others. Raises GroupBroken."""
        ...

    def wait(self, stall: float) -> None:
        """Until all broadcasts that were begun are over. Raises GroupBroken after ``stall`` seconds without one."""
        ...

    def watched(self, stall: float) -> AbstractContextManager[None]:
        """While inside, somebody aborts the group once no broadcast was begun for ``stall`` seconds."""
        ...

    def abort(self) -> None:
        """Leave at once, whatever runs. Idempotent; may be called from any thread."""
        ...


class Groups(Protocol):
    """How groups are made on this process's device."""

    @property
    def version(self) -> str:
        """Of the library: members of one group must have the same."""
        ...

    @property
    def device_name(self) -> str:
        """Tells this process's GPU from all others of its host: two members cannot share one."""
        ...

    def unique_id(self) -> bytes:
        """Names a group that is to be formed."""
        ...

    def join(self, unique_id: bytes, *, rank: int, size: int) -> Group:
        """Returns once all members have joined. Raises GroupBroken when one does not in time."""
        ...


class NcclGroups:
    """:class:`Groups` over NCCL."""

    def __init__(
        self, device: torch.device, *, timeout: float, opening: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """``timeout``: seconds until all members have joined. ``opening``: what surrounds the making of a group."""
        self.device = device
        self._timeout = timeout
        self._opening = opening

    @property
    def version(self) -> str:
        found = ctypes.c_int()
        _check(library().ncclGetVersion(ctypes.byref(found)), "ncclGetVersion")
        return str(found.value)

    @property
    def device_name(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def unique_id(self) -> bytes:
        made = _UniqueId()
        _check(library().ncclGetUniqueId(ctypes.byref(made)), "ncclGetUniqueId")
        return bytes(made)

    def join(self, unique_id: bytes, *, rank: int, size: int) -> Communicator:
        with self._opening():
            return Communicator(unique_id, rank=rank, size=size, device=self.device, timeout=self._timeout)


class Communicator:
    """:class:`Group`: one NCCL communicator. ``abort`` may be called from any thread; one other thread has the rest."""

    def __init__(self, unique_id: bytes, *, rank: int, size: int, device: torch.device, timeout: float) -> None:
        """Join the group; all members must do so within ``timeout`` seconds. Raises GroupBroken."""
        if len(unique_id) != ID_BYTES:
            raise ValueError(f"an NCCL id has {ID_BYTES} bytes, got {len(unique_id)}")
        self.rank, self.size, self.device = rank, size, device
        self._lock = threading.RLock()
        self._library = library()
        self._pending: list[torch.cuda.Event] = []
        self._last: torch.cuda.Event | None = None
        self._progress = time.monotonic()
        self._handle: ctypes.c_void_p | None = ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), _CONFIG_MAGIC, _CONFIG_VERSION, 0)
        name = _UniqueId.from_buffer_copy(unique_id)
        with torch.cuda.device(device):
            code = self._library.ncclCommInitRankConfig(
                ctypes.byref(self._handle), size, name, rank, ctypes.byref(config)
            )
            self._settle(code, f"joining as member {rank} of {size}", timeout)

    @property
    def broken(self) -> bool:
        return self._handle is None

    def broadcast(self, tensor: torch.Tensor, src: int, stream: torch.cuda.Stream | None = None) -> None:
        """See :meth:`Group.broadcast`. The order of broadcasts holds across streams."""
        if tensor.device != self.device or not tensor.is_contiguous():
            raise ValueError(f"broadcasts need contiguous tensors on {self.device}, got one on {tensor.device}")
        stream = stream or torch.cuda.current_stream(self.device)
        if self._last is not None:
            stream.wait_event(self._last)
        with self._lock:
            code = self._library.ncclBroadcast(
                ctypes.c_void_p(tensor.data_ptr()),
                ctypes.c_void_p(tensor.data_ptr()),
                ctypes.c_size_t(tensor.numel() * tensor.element_size()),
                _UINT8,
                src,
                self._alive(),
                ctypes.c_void_p(stream.cuda_stream),
            )
        self._settle(code, "broadcasting", _LAUNCH_TIMEOUT)
        self._last = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._last.record(stream)
        self._pending.append(self._last)
        self._progress = time.monotonic()

    def wait(self, stall: float) -> None:
        """See :meth:`Group.wait`."""
        self._progress = time.monotonic()
        for event in self._pending:
            while not event.query():  # type: ignore[no-untyped-call]
                self._look("broadcasting")
                if time.monotonic() - self._progress > stall:
                    self.abort()
                    raise GroupBroken(f"a member of the group made no progress for {stall:g} s")
                time.sleep(LOOK)
            self._progress = time.monotonic()
        self._pending.clear()
        self._alive()  # kernels end when a communicator is aborted, too

    @contextmanager
    def watched(self, stall: float) -> Iterator[None]:
        """See :meth:`Group.watched`."""
        over = threading.Event()
        self._progress = time.monotonic()

        def watch() -> None:
            while not over.wait(min(stall / 10, 0.25)):
                if time.monotonic() - self._progress > stall:
                    self.abort()
                    return

        threading.Thread(target=watch, name="weights-watchdog", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def abort(self) -> None:
        """See :meth:`Group.abort`. Also the orderly end: it waits for nobody, and others may be gone."""
        with self._lock:
            handle, self._handle = self._handle, None
            if handle is not None:
                with torch.cuda.device(self.device):
                    self._library.ncclCommAbort(handle)

    def _alive(self) -> ctypes.c_void_p:
        handle = self._handle
        if handle is None:
            raise GroupBroken("the group was aborted: a member was lost, or made no progress in time")
        return handle

    def _look(self, what: str) -> int:
        """The state of the communicator: success or in progress. Any other ends it. Raises GroupBroken."""
        state = ctypes.c_int()
        with self._lock:
            code = self._library.ncclCommGetAsyncError(self._alive(), ctypes.byref(state))
            bad = next((found for found in (code, state.value) if found not in (_SUCCESS, _IN_PROGRESS)), None)
            if bad is None:
                return state.value
            told = _told(bad, self._handle)
            self.abort()
        raise GroupBroken(f"{what}: {told}")

    def _settle(self, code: int, what: str, timeout: float) -> None:
        """Until a call that was begun has ended. Raises GroupBroken."""
        if code not in (_SUCCESS, _IN_PROGRESS):
            told = _told(code, self._handle)
            self.abort()
            raise GroupBroken(f"{what}: {told}")
        deadline = time.monotonic() + timeout
        while self._look(what) == _IN_PROGRESS:
            if time.monotonic() > deadline:
                self.abort()
                raise GroupBroken(f"{what}: not done within {timeout:g} s: a member is missing or hangs")
            time.sleep(LOOK / 10)


#: seconds until a broadcast has been handed to the GPU; connections were made when the group was warmed up
_LAUNCH_TIMEOUT = 30.0


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


class _Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


@cache
def library() -> ctypes.CDLL:
    """The libnccl that torch has loaded.

    Raises:
        WeightUpdateError: torch has none: it was built for CPUs alone.
    """
    for name in ("libnccl.so.2", "libnccl.so"):
        with suppress(OSError):
            found = ctypes.CDLL(name)
            found.ncclGetErrorString.restype = ctypes.c_char_p
            found.ncclGetLastError.restype = ctypes.c_char_p
            found.ncclCommInitRankConfig.argtypes = [
                ctypes.c_void_p, ctypes.c_int, _UniqueId, ctypes.c_int, ctypes.c_void_p,
            ]  # fmt: skip
            found.ncclBroadcast.argtypes = [
                ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p,
                ctypes.c_void_p,
            ]  # fmt: skip
            found.ncclCommGetAsyncError.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
            found.ncclCommAbort.argtypes = [ctypes.c_void_p]
            return found
    raise WeightUpdateError("no libnccl can be loaded here: this torch was built without CUDA; use weights.group=gloo")


def _check(code: int, what: str) -> None:
    if code != _SUCCESS:
        raise WeightUpdateError(f"{what}: {_told(code, None)}")


def _told(code: int, handle: ctypes.c_void_p | None) -> str:
    found = library()
    text = str(found.ncclGetErrorString(code).decode())
    last = found.ncclGetLastError(handle if handle is not None else None)
    return f"{text} ({last.decode().strip()})" if last else text
