"""`RunState`: the rows, progress and problems of one run, as the server last read them from its index."""

import contextlib
import sqlite3
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from rolltape.errors import RolltapeError, TapeError
from rolltape.records.rollout import Status
from rolltape.tape.index.database import IndexFile, is_damage, read_about
from rolltape.tape.index.queries import (
    Progress,
    announced_versions,
    count_behind,
    count_rollouts,
    is_recorded,
    source_problems,
)
from rolltape.tape.rundir import RunDirectory
from rolltape.view.run.rows import STATUS_CODE, Rows


class TokenPlace(msgspec.Struct, frozen=True):
    """A token of a sample in a trainer's record."""

    rollout: str
    sample_id: str
    token: int
    place: str  # the record's


class TrainerFigures(msgspec.Struct, frozen=True):
    """Figures of a trainer's token records of a step."""

    step: int
    mark: str  # identifies the state of the step's files
    figures: dict[str, float | None]
    max_mismatch_at: TokenPlace | None = None  # None if no record with a sample id has a mismatch


def about_now(run: RunDirectory) -> dict[str, Any] | None:
    """The run.json that lies there now: of another run, where the first was deleted. None: there is none."""
    try:
        return RunDirectory.opened(run.path).about
    except TapeError:
        return None


class RunState:
    """The state of one run, used by one thread. `snapshot` grows with every change."""

    def __init__(self, file: IndexFile, run: RunDirectory | None, snapshot: int = 0) -> None:
        self._file = file
        self._run = run
        self._known: tuple[object, int] = (None, -1)  # identity and revision of the index that was read
        self.rows = Rows()
        self.snapshot = snapshot
        self.progress = Progress(0, 0, 0, 0, 0)
        self.read_through = False  # the whole tape was indexed once: rollouts that are not indexed are new
        self.live = False  # whether a recording process is alive
        self.announced: Sequence[str] = ()  # weight versions, in their order
        self.last_activity_ns = 0
        self.trainer: dict[int, TrainerFigures] = {}
        self._problems: tuple[str, ...] = ()  # of sources
        self._failure: str | None = None  # why the run or its index cannot be read now

    def refresh(self) -> bool:
        """Read the changes of the index, and return whether there are any."""
        before = self.snapshot
        # Not its index, if it is gone: that would be made again, in a folder that somebody is deleting.
        if self._run is not None and about_now(self._run) != self._run.about:
            failure: str | None = f"{self._run.path}: the run is no longer there; the page shows what was read before"
            self.live = False
        else:
            failure = self._read_index()
        if failure != self._failure:
            self._failure = failure
            self.snapshot += self.snapshot == before
        return self.snapshot != before

    def _read_index(self) -> str | None:
        """Read what is new; returns why it cannot be read, or why it is not kept current."""
        try:
            with self._file.reading() as connection:
                self._read(connection)
                failure: str | None = read_about(connection, "failure")
                return failure
        except (OSError, sqlite3.Error, RolltapeError) as error:
            if isinstance(error, sqlite3.Error) and is_damage(error):
                with contextlib.suppress(OSError, sqlite3.Error):
                    self._file.replace(keep=False)  # the process that keeps it current fills it
            return f"the index cannot be read: {error}"

    @property
    def made(self) -> object:
        """An identity of the index of the rows; a rebuilt index has other numbers."""
        return self._known[0]

    def _read(self, connection: sqlite3.Connection) -> None:
        made, revision = read_about(connection, "made"), int(read_about(connection, "revision", 0))
        known_made, known_revision = self._known
        if (made, revision) == self._known:
            return
        self.snapshot += 1
        if made != known_made:  # the index was rebuilt, with other numbers
            self.rows, known_revision = Rows(), -1
        self.rows.read(connection, known_revision, self.snapshot)
        self._known = (made, revision)
        self.progress = self._progress(connection)
        has_looked = bool(read_about(connection, "looked", 0))
        self.read_through = has_looked and self.progress.is_complete
        if not has_looked and self._run is not None:  # the rollouts have not been counted yet
            self.progress = self.progress._replace(total=max(self.progress.total, count_rollouts(self._run)))
        self.live = is_recorded(connection)
        self.announced = announced_versions(connection)
        self.last_activity_ns = int(read_about(connection, "last_activity_ns", 0))
        self._problems = tuple(map(str, source_problems(connection)))

    def _progress(self, connection: sqlite3.Connection) -> Progress:
        """The progress, counted from the rows."""
        columns, indexed = self.rows.columns, len(self.rows)
        ended = int((columns["status"] != STATUS_CODE[Status.RUNNING]).sum())
        summarized = int((columns["branches"] >= 0).sum())
        ((searchable,),) = connection.execute("SELECT count(*) FROM searchable").fetchall()
        return Progress(indexed, indexed + count_behind(connection), ended, summarized, searchable)

    def add_figures(self, figures: TrainerFigures) -> None:
        """Add figures of a trainer's step, or replace them."""
        self.trainer[figures.step] = figures
        self.snapshot += 1

    @property
    def problems(self) -> list[str]:
        """All read errors: of the run as a whole, its files, its rollouts."""
        whole = [] if self._failure is None else [self._failure]
        return [*whole, *self._problems, *(one for several in self.rows.missing.values() for one in several)]

    def pending(self, rows: object = slice(None)) -> int:
        """How many of these rollouts have ended and still wait for their summary."""
        columns = self.rows.columns
        lacking = (columns["status"] != STATUS_CODE[Status.RUNNING]) & (columns["branches"] < 0)
        lacking[list(self.rows.missing)] = False
        return int(lacking[rows].sum())

    def changed_since(self, snapshot: int) -> Sequence[str]:
        """The rollouts that changed after a snapshot."""
        changed = np.flatnonzero(self.rows.columns["changed"] > snapshot).tolist()
        return list(dict.fromkeys(self.rows.ids[row] for row in changed))

    def close(self) -> None:
        """Close the index."""
        self._file.close()
