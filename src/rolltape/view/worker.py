"""The worker process: it keeps the indexes of served runs current, and adds summaries and words for search."""

import contextlib
import select
import sqlite3
import sys
import time
from collections.abc import Callable

from rolltape.errors import RolltapeError, RunNotFound
from rolltape.samples.summary import summarize
from rolltape.tape.index.background import Filler
from rolltape.tape.index.database import read_about, write_about
from rolltape.tape.run import Run
from rolltape.tape.rundir import FoundRun, find_run

_IDLE_S = 0.5  # between two checks of idle runs
_FILL_S = 0.7  # for summaries and words, between two checks


class _KeptRun:
    """A run whose index is kept current."""

    def __init__(self, location: str) -> None:
        self._location = location
        self._found: FoundRun | None = None
        self._run: Run | None = None  # None if it could not be opened yet, or was deleted
        self._filler: Filler | None = None

    def advance(self, is_over: Callable[[], bool]) -> bool:
        """Index changes, add some of the missing summaries, and return whether none is missing."""
        try:
            run, filler = self._opened()
            run.tape_index.advance()
            end_s = time.monotonic() + _FILL_S
            is_full = filler.fill(lambda: time.monotonic() > end_s or is_over())
            self._store_failure(None)
        except RunNotFound:  # nor is there a place for an index
            self._found = self._run = self._filler = None
            return True
        except (RolltapeError, OSError, sqlite3.Error) as error:
            with contextlib.suppress(RolltapeError, OSError, sqlite3.Error):
                self._store_failure(str(error))
            return True
        return is_full

    def _opened(self) -> tuple[Run, Filler]:
        """The run that lies there now: on a disk, it may have been deleted and recorded again."""
        if self._found is None or self._found.directory is not None:
            found = find_run(self._location)
            if self._found is None or found.about != self._found.about:
                self._found, self._run, self._filler = found, Run(*found), None
        assert self._run is not None
        self._filler = self._filler or Filler(self._run.tape_index, summarize)
        return self._run, self._filler

    def _store_failure(self, failure: str | None) -> None:
        """Store in the index why it is not kept current, for its readers."""
        if self._run is None:
            return
        file = self._run.tape_index.file
        if read_about(file.connection(), "failure") != failure:
            with file.writing() as connection:
                write_about(connection, "failure", failure)
                write_about(connection, "revision", int(read_about(connection, "revision", 0)) + 1)


def keep_current(locations: list[str], is_over: Callable[[float], bool]) -> None:
    """Keep indexes current until `is_over` returns True; it waits up to the given seconds."""
    runs = [_KeptRun(location) for location in locations]
    is_busy = True
    while not is_over(0 if is_busy else _IDLE_S):
        done = [run.advance(lambda: is_over(0)) for run in runs]
        is_busy = not all(done)


def main() -> None:
    """The entry point of the process. Its arguments are the runs, and it ends when its standard input is closed."""
    keep_current(sys.argv[1:], lambda wait_s: bool(select.select([sys.stdin], [], [], wait_s)[0]))
