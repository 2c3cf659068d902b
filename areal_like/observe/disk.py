"""What a disk that is full or gone says, as one error that names the file."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from areal_like.errors import ArealLikeError

#: the disk has no room for us
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises: ArealLikeError: the body, which writes ``path``, met an OSError."""
    try:
        yield
    except OSError as error:
        what = "free space on its disk" if error.errno in FULL else "see to its disk and folder"
        raise ArealLikeError(
            f"{path}: cannot be written: {error.strerror or error}; {what}, or set runs_dir to another"
        ) from error
