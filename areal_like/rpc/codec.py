"""Objects to frames and back: a msgpack tree, and numpy arrays as raw buffers. Nothing is ever unpickled.

Small arrays travel inside the tree; larger ones become frames of their own, which are sent and received without a copy.
Tuples arrive as lists. bfloat16 has no numpy dtype: its callers ship it as a uint16 view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from areal_like.errors import RpcError

Frame = bytes | bytearray | memoryview

#: arrays up to this size are copied into the tree: below it, a frame of its own costs more than the copy
INLINE_BYTES = 4096
_INLINE, _FRAMED = 1, 2
#: numpy kinds whose bytes are plain numbers (bool, integers, floats, complex); never objects, never records
_PLAIN_KINDS = frozenset("biufc")


def encode(tree: Any) -> list[Frame]:
    """Encode ``tree`` of None, bool, int, float, str, bytes, lists, dicts and numpy arrays.

    The first frame is the tree, the others are views of its larger arrays: leave those unchanged until they are sent.

    Raises:
        TypeError: the tree holds something else; convert dataclasses and models first.
    """
    frames: list[Frame] = [b""]

    def extension(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray):
            raise TypeError(f"cannot encode {type(value).__name__}; only plain values and numpy arrays cross a socket")
        if value.dtype.kind not in _PLAIN_KINDS:
            raise TypeError(f"cannot encode an array of dtype {value.dtype}; only plain numbers cross a socket")
        array = np.ascontiguousarray(value)
        if array.nbytes <= INLINE_BYTES:
            return msgpack.ExtType(_INLINE, msgpack.packb((array.dtype.str, value.shape, array.tobytes())))
        frames.append(array.reshape(-1).view(np.uint8).data)
        return msgpack.ExtType(_FRAMED, msgpack.packb((array.dtype.str, value.shape, len(frames) - 1)))

    frames[0] = msgpack.packb(tree, default=extension)
    return frames


def decode(frames: Sequence[Frame]) -> Any:
    """Decode what :func:`encode` made. Arrays are read-only views of the frames.

    Raises:
        RpcError: the frames are malformed.
    """

    def extension(code: int, data: bytes) -> np.ndarray[Any, Any]:
        dtype_text, shape, payload = msgpack.unpackb(data)
        dtype = np.dtype(dtype_text)
        if dtype.kind not in _PLAIN_KINDS:
            raise ValueError(f"dtype {dtype} is not allowed")
        if code not in (_INLINE, _FRAMED):
            raise ValueError(f"unknown extension {code}")
        if code == _FRAMED and not 1 <= payload < len(frames):
            raise ValueError(f"frame {payload} of {len(frames)} does not exist")
        array = np.frombuffer(payload if code == _INLINE else frames[payload], dtype=dtype).reshape(shape)
        array.flags.writeable = False
        return array

    try:
        return msgpack.unpackb(frames[0], ext_hook=extension, strict_map_key=False)
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise RpcError(f"malformed message of {len(frames)} frames: {error}") from error
