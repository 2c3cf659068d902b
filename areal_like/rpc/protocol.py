"""What is said over an RPC socket, and the rules that make a call happen at most once. No sockets in here.

A client greets a server once and learns its instance id. Every call carries (client id, number, instance id): the
server runs a number once, keeps its reply until the client's next call or acknowledgement, and answers a resend from
there; a server that was restarted in between refuses, because it cannot know what its predecessor did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from areal_like.errors import RemoteError, RpcError
from areal_like.rpc.codec import Frame, decode, encode

#: seconds until a call without a reply is sent again, and the most that doubling makes of it
FIRST_RESEND, LAST_RESEND = 1.0, 30.0


class Ask(StrEnum):
    HELLO = "hello"
    CALL = "call"
    ACKNOWLEDGE = "acknowledge"


class Answer(StrEnum):
    HELLO = "hello"
    RESULT = "result"
    RAISED = "raised"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """``seconds_left`` is relative, since clocks of two hosts differ; ``instance`` is the server the client greeted."""

    ask: Ask
    client: str
    number: int
    instance: str = ""
    method: str = ""
    seconds_left: float = 0.0
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answers request ``number``. A failure carries the remote type, message and traceback text."""

    answer: Answer
    number: int
    instance: str
    value: Any = None
    remote_type: str = ""
    message: str = ""
    traceback: str = ""


def encode_request(request: Request) -> list[Frame]:
    return encode(_fields(request))


def decode_request(frames: Sequence[Frame]) -> Request:
    """Raises RpcError for anything that is no request."""
    fields = decode(frames)
    try:
        return Request(**{**fields, "ask": Ask(fields["ask"])})
    except (TypeError, KeyError, ValueError) as error:
        raise RpcError(f"not a request: {error}") from error


def encode_reply(reply: Reply) -> list[Frame]:
    return encode(_fields(reply))


def decode_reply(frames: Sequence[Frame]) -> Reply:
    """Raises RpcError for anything that is no reply."""
    fields = decode(frames)
    try:
        return Reply(**{**fields, "answer": Answer(fields["answer"])})
    except (TypeError, KeyError, ValueError) as error:
        raise RpcError(f"not a reply: {error}") from error


def value_of(reply: Reply, method: str, address: str) -> Any:
    """The method's result.

    Raises:
        RemoteError: the method raised.
        RpcError: the server refused to run it.
    """
    if reply.answer is Answer.RAISED:
        raise RemoteError(
            f"{method} at {address} raised {reply.remote_type}: {reply.message}",
            remote_type=reply.remote_type,
            remote_traceback=reply.traceback,
        )
    if reply.answer is Answer.REFUSED:
        raise RpcError(f"{address} refused {method}: {reply.message}")
    return reply.value


def no_answer(method: str, address: str, timeout: float) -> RpcError:
    """The error of a call whose deadline passed."""
    return RpcError(
        f"{method} at {address}: no answer within {timeout:g} s; the process may be dead, stalled, or still at work "
        f"(its log and health socket tell); it will not run this call a second time"
    )


def _fields(message: Request | Reply) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__dataclass_fields__}
