"""The answers for one run: its figures, its table, and what a search finds."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from rolltape.errors import NoAnswer
from rolltape.records.rollout import Status
from rolltape.tape.index.database import read_about
from rolltape.tape.index.search import find, search_terms
from rolltape.view.listing import Listing, Query
from rolltape.view.overview import headline_of, overview_of
from rolltape.view.rows import STATUS_CODE, Array
from rolltape.view.watching import WatchedRun

Work = Callable[[], Any]


class Searched(NamedTuple):
    """What a search found, and where."""

    made: object  # the index that was searched
    searchable: int  # rollouts in it that were searched
    numbers: Array  # of the rollouts in which all that is asked for occurs


class RunAnswers:
    """What can be asked of a run."""

    def __init__(self, run: WatchedRun) -> None:
        self.run = run
        self._listing: Listing | None = None
        self._overviews: dict[int | None, dict[str, Any]] = {}
        self._search_lock = threading.Lock()

    def listing(self) -> Listing:
        """The table as it is now."""
        self.run.state.refresh()
        if self._listing is None or self._listing.snapshot != self.run.state.snapshot:
            self._listing = Listing(self.run.state)
            self._overviews.clear()
        return self._listing

    def headline(self) -> dict[str, Any]:
        about = {"r": self.run.name, "name": self.run.title, "location": self.run.location}
        return {**about, **headline_of(self.listing())}

    def overview(self, step: int | None) -> dict[str, Any]:
        listing = self.listing()
        if step not in self._overviews:
            about = {"name": self.run.title, "location": self.run.location, "live": self.run.state.live}
            self._overviews = {step: {**about, **overview_of(listing, step)}}
        return self._overviews[step]

    def search(self, asked: str) -> Work:
        """Looks a text up in the index."""
        if not search_terms(asked):
            raise NoAnswer(f"q is {asked[:40]!r}; give at least one word")

        def work() -> Searched:
            with self._search_lock, self.run.search_file.reading() as connection:
                ((searchable,),) = connection.execute("SELECT count(*) FROM searchable").fetchall()
                return Searched(read_about(connection, "made"), searchable, find(connection, asked))

        return work

    def table(self, query: Query, searched: Searched | None) -> dict[str, Any]:
        listing = self.listing()
        if searched is None:
            return listing.page(query, listing.matching(query, None))
        if searched.made != self.run.state.made:  # the index was made again meanwhile
            searched = Searched(None, 0, np.empty(0, np.int64))
        page = listing.page(query, listing.matching(query, searched.numbers))
        return {**page, "search": {"indexed": searched.searchable, "ended": self.run.state.progress.ended}}

    def row(self, rollout: str, try_index: str | None) -> int:
        """The row of a rollout: of the try that is named, else of the one that counts; raises NoAnswer."""
        rows = self.listing().state.rows
        if try_index:
            if not (try_index.isascii() and try_index.isdecimal() and len(try_index) < 10):
                raise NoAnswer(f"try is {try_index[:40]!r}; give a whole number")
            row = rows.row_of(rollout, int(try_index))
        else:
            row = self.counted(self.tries(rollout))
        if row is None:
            which = f" with a try {try_index}" if try_index else ""
            raise NoAnswer(f"run {self.run.title} holds no rollout {rollout[:64]!r}{which}", 404)
        return row

    def counted(self, tries: dict[int, int]) -> int | None:
        """The row of the latest try that finished, else of the latest; None: there is none."""
        finished = STATUS_CODE[Status.FINISHED]
        statuses = self.listing().statuses
        return max(tries.items(), key=lambda one: (statuses[one[1]] == finished, one[0]), default=(0, None))[1]

    def tries(self, rollout: str) -> dict[int, int]:
        """The rows of a rollout's tries."""
        rows = self.run.state.rows
        found_rows: dict[int, int] = {}
        misses = 0
        # Tries are counted from 0; one may be missing that was lost.
        index = 0
        while misses < 8:
            row = rows.row_of(rollout, index)
            misses = misses + 1 if row is None else 0
            if row is not None:
                found_rows[index] = row
            index += 1
        return found_rows
