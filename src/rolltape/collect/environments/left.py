"""What an agent left to be looked at: its last text, or a file of its working directory."""

import os
import stat
from pathlib import Path

import msgspec

from rolltape.collect.environments.protocol import Ended

_MOST_BYTES = 16 * 2**20


class Left(msgspec.Struct, frozen=True):
    """A text, or why there is none."""

    text: str = ""
    missing: str | None = None


def left_by(ended: Ended, file: str | None) -> Left:
    """The last text, or that file's. What an agent left is not trusted: links out of its directory are not followed."""
    if file is None:
        return Left(ended.text)
    if ended.folder is None:
        return Left(missing=f"{file} is looked for, and this agent has no working directory")
    path = os.path.realpath(ended.folder / file)
    if not Path(path).is_relative_to(os.path.realpath(ended.folder)):
        return Left(missing=f"{file} leads out of the working directory")
    try:
        # A pipe without a writer would keep a plain open waiting.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as opened:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return Left(missing=f"{file} is no plain file")
            content = opened.read(_MOST_BYTES + 1)
    except OSError as error:
        return Left(missing=f"{file} cannot be read: {error.strerror}")
    if len(content) > _MOST_BYTES:
        return Left(missing=f"{file} has more than {_MOST_BYTES} bytes")
    return Left(content.decode(errors="replace"))
