"""What is said over an RPC socket, and the rules that make a call happen at most once. No sockets in here.

A client greets a server once and learns its instance id. Every call carries (client id, number, instance id): the
server runs a number once, keeps its reply until the client's next call or acknowledgement, and answers a resend from
there; a server that was restarted in between refuses, because it cannot know what its predecessor did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, TypeVar

from areal_like.errors import RemoteError, RpcError
from areal_like.rpc.codec import Frame, decode, encode

#: what every field must be; a reply's value may be anything
_FIELD_TYPES: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "client": (str,),
        "number": (int,),
        "instance": (str,),
        "method": (str,),
        "seconds_left": (int, float),
        "arguments": (dict,),
        "remote_type": (str,),
        "message": (str,),
        "traceback": (str,),
    }
)
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


M = TypeVar("M", Request, Reply)


def encode_request(request: Request) -> list[Frame]:
    return encode(_fields(request))


def decode_request(frames: Sequence[Frame]) -> Request:
    """Raises RpcError for anything that is no request."""
    return _typed(frames, Request, "ask", Ask)


def encode_reply(reply: Reply) -> list[Frame]:
    return encode(_fields(reply))


def decode_reply(frames: Sequence[Frame]) -> Reply:
    """Raises RpcError for anything that is no reply."""
    return _typed(frames, Reply, "answer", Answer)


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


def _typed(frames: Sequence[Frame], form: type[M], kind: str, kinds: type[StrEnum]) -> M:
    """A message of dataclass ``form``, every field of its declared type: the other end is not trusted to be ours."""
    fields = decode(frames)
    try:
        message = form(**{**fields, kind: kinds(fields[kind])})
    except (TypeError, KeyError, ValueError) as error:
        raise RpcError(f"not a {form.__name__}: {error}") from error
    for name, types in _FIELD_TYPES.items():
        if hasattr(message, name) and not isinstance(getattr(message, name), types):
            raise RpcError(f"not a {form.__name__}: {name} is of type {type(getattr(message, name)).__name__}")
    return message


def _fields(message: Request | Reply) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__dataclass_fields__}
