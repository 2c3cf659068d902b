"""The form in which a trajectory crosses a socket: a dict of numpy arrays and plain values (see ``rpc/codec.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from areal_like.api.trajectory import Trajectory


def to_wire(trajectory: Trajectory, *, key: str = "") -> dict[str, Any]:
    """``trajectory`` as a dict; arrays are shared, not copied. ``returns`` is left out where there are none."""
    wire: dict[str, Any] = {
        "key": key,
        "group_id": trajectory.group_id,
        "episode_id": trajectory.episode_id,
        "reward": trajectory.reward,
        "token_ids": trajectory.token_ids,
        "loss_mask": trajectory.loss_mask,
        "logprobs": trajectory.logprobs,
        "versions": trajectory.versions,
    }
    if trajectory.returns is not None:
        wire["returns"] = trajectory.returns
    return wire


def from_wire(wire: Mapping[str, Any]) -> Trajectory:
    """The trajectory that :func:`to_wire` described. Arrays may be read-only views of the message.

    Raises:
        KeyError: a field is missing.
    """
    returns = wire.get("returns")
    return Trajectory(
        token_ids=np.asarray(wire["token_ids"], np.int32),
        loss_mask=np.asarray(wire["loss_mask"], np.int32),
        logprobs=np.asarray(wire["logprobs"], np.float32),
        versions=np.asarray(wire["versions"], np.int32),
        reward=float(wire["reward"]),
        returns=None if returns is None else np.asarray(returns, np.float32),
        group_id=wire["group_id"],
        episode_id=wire["episode_id"],
    )
