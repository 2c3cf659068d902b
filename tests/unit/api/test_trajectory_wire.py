"""A trajectory on the wire: through the codec and back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from areal_like.api.trajectory import Trajectory
from areal_like.api.trajectory_wire import from_wire, to_wire
from areal_like.rpc.codec import decode, encode

ROW = Trajectory(
    token_ids=np.array([1, 2], np.int32),
    loss_mask=np.array([0, 1], np.int32),
    logprobs=np.array([0, -0.1], np.float32),
    versions=np.array([-1, 5], np.int32),
    reward=0.1,
    returns=np.array([0, 0.3], np.float32),
    group_id="g",
    episode_id="e",
)


def test_every_field_survives_bit_for_bit() -> None:
    wire = decode(encode(to_wire(ROW, key="k")))
    back = from_wire(wire)
    assert wire["key"] == "k"
    assert (back.reward, back.group_id, back.episode_id) == (0.1, "g", "e")
    for name in ("token_ids", "loss_mask", "logprobs", "versions", "returns"):
        before, after = getattr(ROW, name), getattr(back, name)
        assert after.dtype == before.dtype
        assert after.tobytes() == before.tobytes()


def test_without_returns_there_is_no_such_field() -> None:
    wire = to_wire(replace(ROW, returns=None))
    assert "returns" not in wire
    assert from_wire(wire).returns is None
