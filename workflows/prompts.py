"""From a dataset row to the first prompt of an episode, and to what a reward function gets to see of the row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_like.api import Tokenizer
from areal_like.api.workflow import reward_fields

__all__ = ["prompt_ids", "reward_fields"]


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
