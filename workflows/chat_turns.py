"""Token ids of a chat's next messages, when what came before must stay exactly as it was sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from areal_like.api import Tokenizer

#: two answers that end in different tokens: what their renderings have in common at the end is what follows an answer
_STAND_INS = ("yes", "no")


class ChatTurns:
    """Renders only what follows an answer: the end of the assistant's turn, new messages, the next generation prompt.

    The chat so far cannot be rendered again: encoding decoded text may give other ids, and templates drop parts of
    earlier answers (reasoning). So the new messages are rendered behind two stand-in conversations that differ in their
    answer alone, and the common end of both is taken.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of the first messages, generation prompt included."""
        return self._tokenizer.apply_chat_template(messages)

    def following(self, answer_ids: Sequence[int], messages: Sequence[Mapping[str, Any]], *, last: bool) -> list[int]:
        """Ids to append behind ``answer_ids``; ``last`` leaves the generation prompt out.

        Raises:
            ValueError: the template leaves earlier answers out, or refuses the messages.
        """
        first, second = (self._render(answer, messages, last) for answer in _STAND_INS)
        if first == second:
            raise ValueError(
                "this chat template leaves earlier answers out when messages follow, so a conversation cannot be "
                "appended to; let the environment give text instead of messages"
            )
        pairs = zip(reversed(first), reversed(second), strict=False)
        size = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        tail = first[len(first) - size :]
        # the model may have written the end of its turn itself; where its budget cut it off, the template's is added
        written = bool(answer_ids) and bool(tail) and answer_ids[-1] == tail[0]
        return tail[1:] if written else tail

    def _render(self, answer: str, messages: Sequence[Mapping[str, Any]], last: bool) -> list[int]:
        stand_in = ({"role": "user", "content": "?"}, {"role": "assistant", "content": answer})
        return self._tokenizer.apply_chat_template([*stand_in, *messages], add_generation_prompt=not last)
