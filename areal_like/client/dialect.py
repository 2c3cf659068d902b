"""How generation is spoken to one server: our request into its HTTP call, its answer into ours. Pure translation.

The :class:`Poster` moves the bytes. A dialect belongs to one server, since what an engine is told may depend on the
version that this server has (a salt of its prefix cache, for example).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pydantic import ValidationError

from areal_like.api.wire import AbortBody, GenerateAnswer, GenerateBody, GenerateOutput
from areal_like.errors import ServerUnavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCall:
    """A POST of JSON ``content`` to ``path``."""

    path: str
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One answer, in the contract's form, and the server's seconds to its first token (0 where it does not tell)."""

    output: GenerateOutput
    seconds_to_first_token: float = 0.0


class Dialect(Protocol):
    """One server's language. Statuses other than 200 are judged by the poster, alike for all engines."""

    def closed(self) -> str:
        """Why no request may be posted now, such as an update; empty where one may. Costs next to nothing.

        While an update stands still for its last calls, hundreds of answers that it has cut ask this.
        """
        ...

    def generate(self, body: GenerateBody) -> HttpCall:
        """The call that asks for the one answer of ``body`` (n = 1).

        Raises:
            RequestError: the engine cannot do what is asked.
            ServerBusy: it is closed.
        """
        ...

    def read(self, body: GenerateBody, content: bytes) -> Segment:
        """The answer to ``body`` out of a 200.

        Raises:
            ServerUnavailable: the answer does not follow the engine's schema.
        """
        ...

    def abort(self, rid: str) -> HttpCall:
        """The call that frees the slot of a request nobody waits for any more."""
        ...


class EmbeddedDialect:
    """:mod:`areal_like.api.wire` as it stands."""

    def closed(self) -> str:
        return ""

    def generate(self, body: GenerateBody) -> HttpCall:
        return HttpCall(path="/generate", content=body.model_dump_json().encode())

    def read(self, body: GenerateBody, content: bytes) -> Segment:
        try:
            answer = GenerateAnswer.model_validate_json(content)
        except ValidationError as error:
            raise ServerUnavailable(f"the answer breaks the wire schema: {error}") from error
        if answer.rid != body.rid or len(answer.outputs) != 1:
            raise ServerUnavailable(
                f"asked for one output of {body.rid!r}, got {len(answer.outputs)} of {answer.rid!r}"
            )
        return Segment(output=answer.outputs[0], seconds_to_first_token=answer.seconds_to_first_token)

    def abort(self, rid: str) -> HttpCall:
        return HttpCall(path="/abort", content=AbortBody(rids=[rid]).model_dump_json().encode())


#: what every server speaks unless its backend says otherwise
EMBEDDED = EmbeddedDialect()
