"""Token ids of a chat's next messages, when what came before must stay exactly as it was sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from areal_like.api import Tokenizer


class ChatTurns:
    """Renders only what follows an answer: the end of the assistant's turn, new messages, the next generation prompt.

    The chat so far cannot be rendered again: encoding decoded text may give other ids, and templates drop parts of
    earlier answers (reasoning). So the new messages are rendered behind a stand-in conversation, whose ids are cut off.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of the first messages, generation prompt included."""
        return self._tokenizer.apply_chat_template(messages)

    def following(self, answer_ids: Sequence[int], messages: Sequence[Mapping[str, Any]], *, last: bool) -> list[int]:
        """Ids to append behind ``answer_ids``; ``last`` leaves the generation prompt out.

        Raises:
            ValueError: the template renders earlier messages differently once others follow, so nothing can be cut off.
        """
        head, stand_in = self._stand_in
        ids = self._tokenizer.apply_chat_template([*_STAND_IN, *messages], add_generation_prompt=not last)
        if ids[: len(stand_in)] != stand_in:
            raise ValueError(
                "this chat template changes earlier messages when others follow; turns cannot be appended to what was "
                "sampled: let the environment give text instead of messages"
            )
        tail = ids[self._end_of_answer(head, stand_in) :]
        # the model may have written the end of its turn itself; where its budget cut it off, the template's is added
        written = bool(answer_ids) and bool(tail) and answer_ids[-1] == tail[0]
        return tail[1:] if written else tail

    @cached_property
    def _stand_in(self) -> tuple[int, list[int]]:
        """Length of the stand-in's opening, and all its ids."""
        opening = self._tokenizer.apply_chat_template(_STAND_IN[:1])
        return len(opening), self._tokenizer.apply_chat_template(_STAND_IN, add_generation_prompt=False)

    def _end_of_answer(self, head: int, stand_in: list[int]) -> int:
        """Where the stand-in's answer ends: at the end-of-sequence token behind it, if the template writes one."""
        end = self._tokenizer.eos_token_id
        for position in range(head, len(stand_in)):
            if stand_in[position] == end:
                return position
        return len(stand_in)


_STAND_IN: tuple[Mapping[str, Any], ...] = (
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": "answer"},
)
