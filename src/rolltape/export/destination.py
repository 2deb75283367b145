"""Where an export goes: a file that appears only when it is complete, or standard output."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rolltape.errors import ExportError

Destination = str | os.PathLike[str]


@contextmanager
def destination(out: Destination) -> Iterator[IO[bytes]]:
    """Open `out` for writing; `-` is standard output. A file is put in place at the end, or left as it was."""
    if os.fspath(out) == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(out).resolve()
    if path.exists() and not path.is_file():
        # A device or a pipe is written to, not replaced.
        with _naming(out), path.open("wb") as stream:
            yield stream
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with _naming(out):
        try:
            with partial.open("wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def _naming(out: Destination) -> Iterator[Any]:
    try:
        yield
    except OSError as error:
        raise ExportError(f"{os.fspath(out)} cannot be written: {error.strerror or error}") from None
