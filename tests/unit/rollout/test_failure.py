import re
from pathlib import Path
from typing import Any

import pytest

from areal_like.errors import EpisodeError, NoServerAvailable, RequestError, RewardError, ServerUnavailable
from areal_like.rollout.failure import (
    FailureKind,
    headline_of,
    kind_of,
    no_server_in,
    root_of,
    signature_of,
    traceback_tail,
)


def caused_by(cause: Exception) -> Exception:
    try:
        raise RuntimeError("wrapped") from cause
    except RuntimeError as error:
        return error


def raised(message: str) -> Exception:
    try:
        raise ValueError(message)
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError(), FailureKind.WORKFLOW),
        (RewardError(), FailureKind.WORKFLOW),
        (EpisodeError(), FailureKind.WORKFLOW),
        (RequestError(), FailureKind.REQUEST),
        (ServerUnavailable(), FailureKind.INFRASTRUCTURE),
        (NoServerAvailable(), FailureKind.FATAL),
        (caused_by(ServerUnavailable()), FailureKind.INFRASTRUCTURE),
        (caused_by(NoServerAvailable()), FailureKind.FATAL),
        (ExceptionGroup("turns", [ValueError(), ServerUnavailable()]), FailureKind.INFRASTRUCTURE),
        (ExceptionGroup("turns", [ExceptionGroup("x", [NoServerAvailable()])]), FailureKind.FATAL),
    ],
)
def test_kinds(error: Exception, kind: FailureKind) -> None:
    assert kind_of(error) is kind


def test_an_error_while_an_other_was_handled_is_the_users_own() -> None:
    try:
        try:
            raise ServerUnavailable("gone")
        except ServerUnavailable:
            raise KeyError("bug in the except clause")  # noqa: B904
    except KeyError as error:
        assert kind_of(error) is FailureKind.WORKFLOW


def test_the_fatal_cause_is_found() -> None:
    fatal = NoServerAvailable("none")
    assert no_server_in(ExceptionGroup("x", [caused_by(fatal)])) is fatal
    assert no_server_in(ValueError()) is None


def test_one_fault_has_one_signature() -> None:
    assert signature_of(raised("row 17 at 0x7f00")) == signature_of(raised("row 4 at 0x1234"))
    assert signature_of(raised("row 17")) != signature_of(raised("column 17"))
    assert signature_of(ValueError("row 17")) != signature_of(raised("row 17"))  # raised elsewhere


def test_texts_of_an_exception_group_are_those_of_its_first_member() -> None:
    group = ExceptionGroup("two", [ExceptionGroup("one", [raised("first\nline")]), KeyError()])
    assert str(root_of(group)) == "first\nline"
    assert headline_of(group) == "ValueError: first line"
    assert "raise ValueError(message)" in traceback_tail(group)


def test_a_headline_has_no_traceback_in_it() -> None:
    """What a worker's error says ends in the worker's traceback."""
    text = (
        'reward f failed:\nKeyError: 1\nTraceback (most recent call last):\n  File "f.py", line 3\n    ^^^\nKeyError: 1'
    )
    assert headline_of(RewardError(text)) == "RewardError: reward f failed: KeyError: 1"


def test_a_traceback_tail_is_short_and_holds_the_innermost_frames() -> None:
    def deep(level: int) -> None:
        if level:
            deep(level - 1)
        raise ValueError("at the bottom")

    with pytest.raises(ValueError, match="at the bottom") as caught:
        deep(30)
    tail = traceback_tail(caught.value)
    assert len(tail.splitlines()) == 12
    assert tail.endswith("ValueError: at the bottom")


def test_a_traceback_tail_has_no_marks_and_the_frame_of_the_users_own_code(tmp_path: Path) -> None:
    """However deep in a library the error was raised."""
    workflow = tmp_path / "my_workflow.py"
    workflow.write_text("import re\n\ndef score(text):\n    return re.compile(text + '(' * 3)\n")
    scope: dict[str, Any] = {}
    exec(compile(workflow.read_text(), str(workflow), "exec"), scope)
    with pytest.raises(re.error) as caught:
        scope["score"]("a" + "(?:" * 8)
    lines = traceback_tail(caught.value).splitlines()
    assert len(lines) == 12
    assert lines[:3] == [
        f'  File "{workflow}", line 4, in score',
        "    return re.compile(text + '(' * 3)",
        "  ...",
    ]
    assert lines[-1].startswith("re.error: ") or lines[-1].startswith("re.PatternError: ")
    assert not any(set(line) <= set(" ^~") for line in lines)


class Unshowable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def test_an_error_that_cannot_be_shown_is_still_told() -> None:
    assert headline_of(Unshowable()) == "Unshowable: (its message cannot be shown: ValueError)"
    assert signature_of(Unshowable()).startswith("Unshowable|")
    assert "Unshowable" in traceback_tail(Unshowable())
