"""The codec: values and arrays survive, everything else is refused on both sides."""

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_like.errors import RpcError
from areal_like.rpc.codec import INLINE_BYTES, decode, encode

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(plain)
def test_plain_values_round_trip(tree):
    assert decode([bytes(f) for f in encode(tree)]) == tree


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "int32", "int64", "float16", "float32", "float64", "complex64"]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2000,), (40, 50)])
def test_arrays_round_trip(dtype, shape):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    back = decode(encode({"a": array}))["a"]
    assert back.dtype == array.dtype and back.shape == array.shape
    np.testing.assert_array_equal(back, array)


def test_large_arrays_are_frames_without_a_copy():
    array = np.arange(INLINE_BYTES, dtype=np.int32)
    frames = encode([array, np.ones(3)])
    assert len(frames) == 2
    array[0] = 77
    assert decode(frames)[0][0] == 77


def test_a_transposed_array_keeps_its_values():
    array = np.arange(6000.0).reshape(60, 100).T
    np.testing.assert_array_equal(decode(encode(array)), array)


def test_numpy_scalars_become_numbers():
    assert decode(encode([np.float32(0.5), np.int64(3), np.bool_(True)])) == [0.5, 3, True]


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([object()]), np.array(["a"])])
def test_other_objects_are_refused_when_sent(value):
    with pytest.raises(TypeError, match="cannot encode"):
        encode({"x": value})


def _extension(code, content):
    return [msgpack.packb(msgpack.ExtType(code, msgpack.packb(content)))]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        _extension(1, ("|O", [1], b"12345678")),
        _extension(1, ("<f4", [3], b"1234")),
        _extension(2, ("<f4", [1], 5)),
        _extension(2, ("<f4", [1], 0)),
        _extension(9, ("<f4", [1], b"1234")),
    ],
)
def test_malformed_frames_are_an_error(frames):
    with pytest.raises(RpcError, match="malformed"):
        decode(frames)
