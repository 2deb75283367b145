"""`RunAnswers`: the answers about one run as a whole: its overview, its table, and its searches."""

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from rolltape.errors import NoAnswer, RolltapeError
from rolltape.records.rollout import Annotations, Status
from rolltape.tape.index.database import read_about
from rolltape.tape.index.index import NamedTries
from rolltape.tape.index.queries import annotations_by_hand, note_texts
from rolltape.tape.index.search import LiveWords, find, search_terms, term_patterns
from rolltape.tape.stored import Key
from rolltape.view.annotating import build_notes
from rolltape.view.answers import parse_count, parse_policy
from rolltape.view.run.change import build_change
from rolltape.view.run.exporting import export_form, in_chunks, rollout_lines, sample_lines, table_rows
from rolltape.view.run.found_lines import find_line
from rolltape.view.run.listing import Listing, Query
from rolltape.view.run.overview import build_headline, build_overview
from rolltape.view.run.rows import STATUS_CODE, Array
from rolltape.view.run.tasks import build_tasks
from rolltape.view.served_runs import ServedRun

Work = Callable[[], Any]

_MOST_LIVE = 1000  # running rollouts that are searched, the latest ones
_MOST_LINES = 64


class Searched(NamedTuple):
    """The result of a search."""

    made: object  # identifies the index that was searched
    searched: int  # rollouts
    numbers: Array  # of the rollouts that contain all words


def find_run_answers(runs: "Mapping[str, RunAnswers]", name: str) -> "RunAnswers":
    """The answers about the run with this name; raises NoAnswer."""
    found = runs.get(name)
    if found is None:
        raise NoAnswer(f"no run {name[:64]!r} is served here; these are: {', '.join(runs)}", 404)
    return found


class RunAnswers:
    def __init__(self, run: ServedRun) -> None:
        self.run = run
        self._listing: Listing | None = None
        self._overviews: dict[int | None, dict[str, Any]] = {}
        self._search_lock = threading.Lock()
        self._live_words = LiveWords()

    def listing(self) -> Listing:
        """The table as the index has it now. An answer reads it once: rows of another reading may be others."""
        self.run.state.refresh()
        return self.held_listing()

    def held_listing(self) -> Listing:
        """The table as it was last read."""
        if self._listing is None or self._listing.snapshot != self.run.state.snapshot:
            self._listing = Listing(self.run.state)
            self._overviews.clear()
        return self._listing

    def headline(self) -> dict[str, Any]:
        about = {"r": self.run.name, "name": self.run.title, "location": self.run.location}
        return {**about, **build_headline(self.listing())}

    def overview(self, step: int | None) -> dict[str, Any]:
        listing = self.listing()
        if step not in self._overviews:
            about = {"name": self.run.title, "location": self.run.location, "live": self.run.state.live}
            self._overviews = {step: {**about, **build_overview(listing, step)}}
        return self._overviews[step]

    def tasks(self, query: Query) -> dict[str, Any]:
        return build_tasks(self.listing(), query)

    def change(self, query: Query) -> dict[str, Any]:
        return build_change(self.listing(), query)

    def load_annotations(self) -> dict[Key, Annotations]:
        """The tags and notes that people wrote, by rollout. Call it in a thread."""
        with self._search_lock, self.run.search_file.reading() as connection:
            return annotations_by_hand(connection)

    def notes(self, held: dict[Key, Annotations]) -> dict[str, Any]:
        """The newest of these tags and notes, and their number."""
        listing = self.listing()
        found = {key: listing.state.rows.tries(key[0]).get(key[1]) for key in held}
        return build_notes(held, {key: listing.name(row) for key, row in found.items() if row is not None})

    def search(self, asked: str) -> Work:
        """Search for words: in ended rollouts by the index, in the recorded part of running ones, and in notes."""
        if not search_terms(asked):
            raise NoAnswer(f"q is {asked[:40]!r}, without a word; give at least one word")
        listing = self.listing()
        rows, running = listing.state.rows, np.flatnonzero(listing.statuses == STATUS_CODE[Status.RUNNING])
        live = {row + 1: (rows.key(row), rows.get("turns", row)) for row in running[-_MOST_LIVE:].tolist()}

        def work() -> Searched:
            with self._search_lock, self.run.search_file.reading() as connection:
                self._read_live(live)
                ((searchable,),) = connection.execute("SELECT count(*) FROM searchable").fetchall()
                found = find(connection, asked, self._live_words, note_texts(connection))
                return Searched(read_about(connection, "made"), searchable + len(self._live_words), found)

        return work

    def _read_live(self, live: Mapping[int, tuple[Key, int]]) -> None:
        """Update the words of running rollouts; unreadable ones are not searched."""
        self._live_words.keep_only(live)
        for number, (key, turns) in live.items():
            if self._live_words.lacks(number, turns):
                with contextlib.suppress(RolltapeError, OSError, sqlite3.Error):
                    self._live_words.put(number, turns, self.run.index.messages(key))

    def lines(self, query: Query) -> Work:
        """For each rollout in `rollouts` (ids with tries), the line with the most matches of a search."""
        patterns, named = term_patterns(query.get("q", "")), query.get("rollouts", "").split(",")
        if not patterns or len(named) > _MOST_LINES:
            raise NoAnswer(f"give at least one word as q, and at most {_MOST_LINES} rollouts, as ID.TRY,ID.TRY")
        parts = [one.rpartition(".") for one in named]
        keys = [(rollout, parse_count({"try": tried}, "try", 0, 2**31)) for rollout, _, tried in parts]

        def work() -> dict[str, Any]:
            found = {}
            held = self.load_annotations()
            for key in keys:
                with contextlib.suppress(RolltapeError, OSError, sqlite3.Error):  # it was found, but cannot be read
                    notes = held.get(key, Annotations()).notes
                    found[f"{key[0]}.{key[1]}"] = find_line(self.run.index.messages(key), patterns, notes)
            return {"lines": found}

        return work

    def table(self, query: Query, searched: Searched | None) -> dict[str, Any]:
        listing = self.listing()
        page = listing.page(query, self._matching(listing, query, searched))
        if searched is None:
            return page
        count = searched.searched if searched.made == self.run.state.made else 0
        return {**page, "search": {"searched": count, "total": self.run.state.progress.total}}

    def _matching(self, listing: Listing, query: Query, searched: Searched | None) -> Array:
        numbers = None if searched is None else searched.numbers
        if searched is not None and searched.made != self.run.state.made:  # the index was made again meanwhile
            numbers = np.empty(0, np.int64)
        return listing.matching(query, numbers)

    def export(self, query: Query, searched: Searched | None) -> Work:
        """Export the matching rows of the table; the work returns an iterator over chunks of a file."""
        listing, form = self.listing(), export_form(query)
        chosen = listing.sorted(self._matching(listing, query, searched), query.get("sort") or "started")
        if form == "csv":
            return lambda: in_chunks(table_rows(listing, chosen))
        keys = [listing.state.rows.key(row) for row in chosen.tolist()]
        if form == "rollouts":
            return lambda: in_chunks(rollout_lines(self.run.reader, keys))
        return lambda: in_chunks(sample_lines(self.run.reader, keys, parse_policy(query.get("policy"))))

    def holds(self, rollout: str) -> bool:
        """Whether the table has a rollout with exactly this id."""
        return bool(self.listing().state.rows.tries(rollout))

    def row(self, rollout: str, try_index: str | None) -> int:
        """The row of a rollout's named try, else of the try that counts; raises NoAnswer."""
        rows = self.listing().state.rows
        if try_index:
            row = rows.tries(rollout).get(parse_count({"try": try_index}, "try", 0, 2**31))
        else:
            row = self.counted(rows.tries(rollout))
        if row is None:
            which = f" with a try {try_index}" if try_index else ""
            raise NoAnswer(f"run {self.run.title} holds no rollout {rollout[:64]!r}{which}", 404)
        return row

    def row_named(self, found: NamedTries) -> int:
        """The row for an id; of several tries, that of the one that counts."""
        tries = self.listing().state.rows.tries(found.id)
        row = self.counted({one: tries[one] for one in found.tries if one in tries})
        if row is None:
            raise NoAnswer(f"rollout {found.id} is not indexed yet", 404)
        return row

    def counted(self, tries: dict[int, int]) -> int | None:
        """The row of the latest finished try, else of the latest try, or None."""
        finished = STATUS_CODE[Status.FINISHED]
        statuses = self.held_listing().statuses
        return max(tries.items(), key=lambda one: (statuses[one[1]] == finished, one[0]), default=(0, None))[1]
