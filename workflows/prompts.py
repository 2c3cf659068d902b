"""From a dataset row to the first prompt of an episode, and to what a reward function gets to see of the row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_like.api import Tokenizer

#: arguments that every reward function has already; a row's fields of these names are not passed again
_REWARD_ARGUMENTS = frozenset({"prompt", "completions", "prompt_ids", "completion_ids"})


def prompt_ids(data: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Ids of ``data["messages"]`` through the chat template, or of ``data["prompt"]`` as plain text.

    Raises:
        ValueError: the row has neither, or both, or nothing is left of it.
    """
    if ("messages" in data) == ("prompt" in data):
        raise ValueError(f"a row needs 'prompt' (text) or 'messages' (a chat), and not both; it has {sorted(data)}")
    if "messages" in data:
        ids = tokenizer.apply_chat_template(data["messages"])
    elif isinstance(data["prompt"], str):
        ids = tokenizer.encode(data["prompt"])
    else:
        raise ValueError(f"'prompt' must be text, not {type(data['prompt']).__name__}; a chat belongs in 'messages'")
    if not ids:
        raise ValueError("the row's prompt has no tokens")
    return ids


def reward_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a row that a reward function receives by keyword."""
    return {name: value for name, value in data.items() if name not in _REWARD_ARGUMENTS}
