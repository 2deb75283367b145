"""The process that keeps the indexes of served runs current, and fills them. What it finds is in the indexes."""

import contextlib
import select
import sqlite3
import sys
import time
from collections.abc import Callable

from rolltape.errors import RolltapeError
from rolltape.samples.summary import summarize
from rolltape.tape.index.background import Filler
from rolltape.tape.index.database import read_about, write_about
from rolltape.tape.run import Run, read

_LOOK_S = 0.5  # between looks at runs in which nothing happens
_FILL_S = 0.7  # spent on filling in between looks


class _KeptRun:
    """A run whose index is kept current."""

    def __init__(self, location: str) -> None:
        self._location = location
        self._run: Run | None = None  # None: it could not be opened yet
        self._filler: Filler | None = None

    def advance(self, is_over: Callable[[], bool]) -> bool:
        """Index what is new, and fill in some of what is lacking; whether that is all."""
        try:
            if self._run is None or self._filler is None:
                self._run = read(self._location)
                self._filler = Filler(self._run.tape_index, summarize)
            self._run.tape_index.advance()
            end_s = time.monotonic() + _FILL_S
            is_full = self._filler.fill(lambda: time.monotonic() > end_s or is_over())
            self._note_failure(None)
        except (RolltapeError, OSError, sqlite3.Error) as error:
            with contextlib.suppress(RolltapeError, OSError, sqlite3.Error):
                self._note_failure(str(error))
            return True
        return is_full

    def _note_failure(self, failure: str | None) -> None:
        """Have those who read the index say why it is not kept current."""
        if self._run is None:
            return
        file = self._run.tape_index.file
        if read_about(file.connection(), "failure") != failure:
            with file.writing() as connection:
                write_about(connection, "failure", failure)
                write_about(connection, "revision", int(read_about(connection, "revision", 0)) + 1)


def keep_current(locations: list[str], is_over: Callable[[float], bool]) -> None:
    """Work until it is over; `is_over` waits so many seconds for that."""
    runs = [_KeptRun(location) for location in locations]
    is_busy = True
    while not is_over(0 if is_busy else _LOOK_S):
        done = [run.advance(lambda: is_over(0)) for run in runs]
        is_busy = not all(done)


def main() -> None:
    """The process: its arguments are the runs, and it ends when its standard input does."""
    keep_current(sys.argv[1:], lambda wait_s: bool(select.select([sys.stdin], [], [], wait_s)[0]))
