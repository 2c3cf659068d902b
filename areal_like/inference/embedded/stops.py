"""Stop strings: found in the text as it grows, across any token border."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """The one tokenizer method that is needed."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


#: what a decoder writes for bytes that are not yet a whole character
_INCOMPLETE = "�"
#: tokens decoded again as context, since a token's text may depend on its neighbours (leading spaces, byte merges)
_CONTEXT_TOKENS = 6
#: a run of bytes that never becomes a character is given up after so many tokens and taken as it decodes
_LONGEST_CHARACTER = 8


class StopWatcher:
    """Follows one answer's text, of which it keeps as many characters as the longest stop string has.

    Text is decoded incrementally: the new text of a token is what decoding its context plus the token adds to
    decoding the context alone. While the end is an incomplete character, the next token is decoded together with it.
    """

    __slots__ = ("_context_start", "_decoder", "_ids", "_longest", "_read", "_stops", "_tail")

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self._decoder = decoder
        self._stops = tuple(stops)
        self._longest = max(len(s) for s in stops)
        self._ids: list[int] = []
        self._context_start = 0
        self._read = 0
        self._tail = ""

    def push(self, token: int, *, may_end: bool) -> bool:
        """Take one more token; True if its text completes a stop string and the answer ``may_end`` here."""
        self._ids.append(token)
        context = self._decode(self._ids[self._context_start : self._read])
        whole = self._decode(self._ids[self._context_start :])
        added = whole[len(context) :]
        text = self._tail + added
        found = may_end and self._completes(text, len(added))
        if not whole.endswith(_INCOMPLETE) or len(self._ids) - self._read >= _LONGEST_CHARACTER:
            self._tail = text[max(0, len(text) - self._longest) :]
            self._advance()
        return found

    def _completes(self, text: str, added: int) -> bool:
        """A stop string ends within the last ``added`` characters of ``text``."""
        return added > 0 and any(text.find(s, max(0, len(text) - added - len(s) + 1)) >= 0 for s in self._stops)

    def _advance(self) -> None:
        self._read = len(self._ids)
        self._context_start = max(0, self._read - _CONTEXT_TOKENS)
        if self._context_start > 256:
            del self._ids[: self._context_start]
            self._read -= self._context_start
            self._context_start = 0

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        return self._decoder.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
