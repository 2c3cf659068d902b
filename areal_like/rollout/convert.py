"""What ``arun_episode`` returned, checked and turned into trajectories.

Tensors are converted by duck typing (``.tolist()``), so that AReaL's tensor dict is accepted without importing torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from areal_like.api.trajectory import NOT_WRITTEN, Trajectory
from areal_like.errors import EpisodeError

#: a log-softmax in float32 may round above zero by this much; more is no log-prob
_LOGPROB_ROUNDING = 1e-3
_INT32_MAX = 2**31 - 1
#: the keys of AReaL's dict that become rows; ``attention_mask`` and ``rewards`` are read beside them
_DICT_ROWS = ("input_ids", "loss_mask", "logprobs", "versions")
_DICT_NEEDED = (*_DICT_ROWS, "rewards")


def to_trajectories(
    result: object, *, group_id: str, episode_id: str, vocabulary_size: int | None = None
) -> tuple[Trajectory, ...]:
    """Check an episode's result and give its trajectories their ids.

    ``result`` is a Trajectory, a sequence of them, None (a rejected episode: no trajectories), or AReaL's dict:
    ``input_ids, loss_mask, logprobs, versions`` [B, L] (or [L]), ``rewards`` [B], optionally ``attention_mask`` [B, L]
    (padding is removed) and ``returns`` [B, L]; further keys are ignored. Its B rows are B trajectories of one episode.

    Token ids must be < ``vocabulary_size``, where it is known.

    Raises:
        EpisodeError: the result is something else, or a trajectory is inconsistent: unequal lengths; a token id that
            the model does not have; a mask other than 0 and 1, without a 1, or that begins with one; a written token
            without a log-prob ≤ 0 or a version ≥ 0; another token with a log-prob other than 0 or a version other
            than -1; a reward or return not finite.
    """
    where = f"episode {episode_id} of group {group_id}"
    rows = _rows(result, where)
    many = len(rows) > 1
    checked = [
        _checked(row, f"{where}, trajectory {i}" if many else where, vocabulary_size) for i, row in enumerate(rows)
    ]
    return tuple(replace(trajectory, group_id=group_id, episode_id=episode_id) for trajectory in checked)


def _rows(result: object, where: str) -> Sequence[Trajectory]:
    if result is None:
        return ()
    if isinstance(result, Trajectory):
        return (result,)
    if isinstance(result, Mapping):
        return _rows_of_dict(result, where)
    if isinstance(result, Sequence) and not isinstance(result, str | bytes):
        for position, row in enumerate(result):
            if not isinstance(row, Trajectory):
                raise EpisodeError(
                    f"{where}: element {position} of the returned list is {_kind(row)}, not a Trajectory"
                )
        return result
    raise EpisodeError(
        f"{where}: arun_episode returned {_kind(result)}; return a Trajectory, a list of them, None, or AReaL's dict "
        f"of tensors ({', '.join(_DICT_NEEDED)})"
    )


def _rows_of_dict(result: Mapping[Any, Any], where: str) -> list[Trajectory]:
    missing = [key for key in _DICT_NEEDED if key not in result]
    if missing:
        came = ", ".join(map(str, result)) or "nothing"
        raise EpisodeError(f"{where}: the returned dict lacks {', '.join(missing)}; it has {came}")
    names = [*_DICT_ROWS, *(key for key in ("attention_mask", "returns") if result.get(key) is not None)]
    arrays = {name: np.atleast_2d(_array(result[name], f"{where}: {name}")) for name in names}
    shape = arrays["input_ids"].shape
    for name, array in arrays.items():
        if array.ndim != 2 or array.shape != shape:
            raise EpisodeError(
                f"{where}: {name} has shape {list(array.shape)} and input_ids {list(shape)}; all must be [B, L]"
            )
    rewards = _array(result["rewards"], f"{where}: rewards").reshape(-1)
    if rewards.shape[0] != shape[0]:
        raise EpisodeError(f"{where}: {rewards.shape[0]} rewards for {shape[0]} rows; give one reward per row")
    rows = []
    for index in range(shape[0]):
        row = {name: array[index] for name, array in arrays.items()}
        kept = row.get("attention_mask", np.ones(shape[1], np.bool_)).astype(np.bool_)
        rows.append(
            Trajectory(
                token_ids=row["input_ids"][kept],
                loss_mask=row["loss_mask"][kept],
                logprobs=row["logprobs"][kept],
                versions=row["versions"][kept],
                returns=row["returns"][kept] if "returns" in row else None,
                reward=rewards[index],
            )
        )
    return rows


def _checked(row: Trajectory, where: str, vocabulary_size: int | None) -> Trajectory:
    """``row`` with the dtypes that :class:`Trajectory` promises."""
    token_ids = _integers(row.token_ids, f"{where}: token_ids")
    loss_mask = _integers(row.loss_mask, f"{where}: loss_mask")
    logprobs = _floats(row.logprobs, f"{where}: logprobs")
    versions = _integers(row.versions, f"{where}: versions")
    returns = None if row.returns is None else _floats(row.returns, f"{where}: returns")
    arrays: dict[str, npt.NDArray[Any]] = {
        "token_ids": token_ids,
        "loss_mask": loss_mask,
        "logprobs": logprobs,
        "versions": versions,
    }
    if returns is not None:
        arrays["returns"] = returns
    lengths = {name: array.shape[0] for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise EpisodeError(f"{where}: all arrays must have one length, but these are: {listed}")
    _refuse(token_ids < 0, token_ids, f"{where}: token_ids must be ≥ 0")
    if vocabulary_size is not None:
        rule = f"{where}: token_ids must be < {vocabulary_size}, the model's vocabulary"
        _refuse(token_ids >= vocabulary_size, token_ids, rule)
    _refuse((loss_mask != 0) & (loss_mask != 1), loss_mask, f"{where}: loss_mask must be 0 or 1")
    written = loss_mask == 1
    if not written.any():
        raise EpisodeError(f"{where}: loss_mask has no 1, so nothing can be learned from it; return None to reject it")
    if written[0]:
        raise EpisodeError(
            f"{where}: loss_mask begins with a 1, but its first token cannot have been sampled from anything; put the "
            f"prompt before it, if only its <bos>"
        )
    no_logprob = ~np.isfinite(logprobs) | (logprobs > _LOGPROB_ROUNDING)
    _refuse(written & no_logprob, logprobs, f"{where}: logprobs must be finite and ≤ 0 where loss_mask is 1")
    _refuse(~written & (logprobs != 0), logprobs, f"{where}: logprobs must be 0 where loss_mask is 0")
    _refuse(written & (versions < 0), versions, f"{where}: versions must be ≥ 0 where loss_mask is 1")
    _refuse(~written & (versions != NOT_WRITTEN), versions, f"{where}: versions must be -1 where loss_mask is 0")
    if returns is not None:
        _refuse(~np.isfinite(returns), returns, f"{where}: returns must be finite")
    return Trajectory(
        token_ids=token_ids.astype(np.int32),
        loss_mask=loss_mask.astype(np.int32),
        logprobs=logprobs,
        versions=versions.astype(np.int32),
        returns=returns,
        reward=_reward(row.reward, where),
    )


def _refuse(wrong: npt.NDArray[np.bool_], values: npt.NDArray[Any], rule: str) -> None:
    if wrong.any():
        position = int(np.argmax(wrong))
        raise EpisodeError(f"{rule}, but it is {values[position]} at position {position} of {values.shape[0]}")


def _array(values: Any, what: str) -> npt.NDArray[Any]:
    """Numbers from an array, a tensor of any library and device, or nested lists."""
    if not isinstance(values, np.ndarray):
        values = values.tolist() if hasattr(values, "tolist") else values
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise EpisodeError(
            f"{what} is ragged: its rows have unequal lengths; pad them and give attention_mask"
        ) from error
    if array.dtype.kind not in "biuf":
        raise EpisodeError(f"{what} must hold numbers, not {_kind(values)} of {array.dtype}")
    return array


def _vector(values: Any, what: str) -> npt.NDArray[Any]:
    array = _array(values, what)
    if array.ndim != 1:
        raise EpisodeError(f"{what} must have one dimension, not shape {list(array.shape)}")
    return array


def _integers(values: Any, what: str) -> npt.NDArray[np.int64]:
    array = _vector(values, what)
    if array.dtype.kind == "f" and array.size:
        raise EpisodeError(f"{what} must be integers, not {array.dtype}")
    if array.size and array.max() > _INT32_MAX:
        raise EpisodeError(f"{what} must fit 32 bits, but one is {array.max()}")
    return array.astype(np.int64)


def _floats(values: Any, what: str) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):  # becomes infinite, which the caller's check refuses with its position
        return _vector(values, what).astype(np.float32)


def _reward(value: Any, where: str) -> float:
    try:
        reward = float(value)
    except (TypeError, ValueError) as error:
        raise EpisodeError(f"{where}: the reward must be a number, not {_kind(value)}") from error
    if not np.isfinite(reward):
        raise EpisodeError(f"{where}: the reward must be finite, but it is {reward}")
    return reward


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"
