"""One run, read for its summaries and its search index."""

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

from rolltape.records.policy import CutPolicy
from rolltape.records.rollout import Rollout
from rolltape.view.indexing import SearchIndex
from rolltape.view.loading import Loader
from rolltape.view.reports import Derived, Wanted
from rolltape.view.rows import NOT_INDEXABLE
from rolltape.view.summary import summary_of


class Reading:
    """Loads rollouts that have ended, and tells what they come to. For one thread."""

    def __init__(
        self, location: str, folder: Path, policy: CutPolicy, created: float | None, *, search: bool = True
    ) -> None:
        self._policy = policy
        self._loader = Loader(location)
        self._folder = folder
        self._created = created  # the run: an index of another one is of no use
        self._index: SearchIndex | None = None
        self._writes_index = search

    @property
    def index_made(self) -> str | None:
        """Which search index is written here; None: none, or another process writes it."""
        return None if self._index is None else self._index.made

    def ready(self) -> None:
        """Open the search index if it can be had and is not open; one that was deleted meanwhile is made again."""
        if self._index is not None and not self._index.is_there:
            self._let_go()
        if self._writes_index and self._index is None:
            # Another server that watches the same run may write it; once that is gone, it is written here.
            with contextlib.suppress(OSError, sqlite3.Error):
                self._index = SearchIndex(self._folder, self._created)

    def read(self, wanted: Sequence[Wanted]) -> Iterator[Derived]:
        """What each rollout comes to; one that cannot be read comes to nothing."""
        for one in wanted:
            yield self._read(one)
        if self._index is not None:
            try:
                self._index.commit()
            except sqlite3.Error as error:
                self._lose_index(error)

    def _read(self, wanted: Wanted) -> Derived:
        try:
            rollout, missing = self._loader.load(wanted.key, wanted.place, wanted.spots, alive=False)
            summary = summary_of(rollout, self._policy) if wanted.summary else None
        except Exception as error:  # noqa: BLE001 - what a recorded message may hold has no end, nor the ways it can fail
            problem = f"rollout {wanted.key[0]} (try {wanted.key[1]}) cannot be read: {error}"
            return Derived(wanted.key, None, NOT_INDEXABLE if wanted.search else None, (problem,))
        number = self._indexed(rollout) if wanted.search else None
        return Derived(wanted.key, summary, number, tuple(map(str, missing)))

    def _indexed(self, rollout: Rollout) -> int | None:
        if self._index is None:
            return None
        try:
            return self._index.add(rollout)
        except sqlite3.Error as error:
            self._lose_index(error)
            return None
        except Exception:  # noqa: BLE001 - as above
            return NOT_INDEXABLE

    def _lose_index(self, error: sqlite3.Error) -> None:
        """Go on without an index: one that was deleted or is damaged is made again, else (a full disk) it is left."""
        assert self._index is not None
        is_damaged = not isinstance(error, sqlite3.OperationalError)
        if is_damaged:
            self._index.remove()
        self._writes_index = is_damaged or not self._index.is_there
        self._let_go()

    def _let_go(self) -> None:
        if self._index is not None:
            with contextlib.suppress(sqlite3.Error):
                self._index.close()
            self._index = None

    def close(self) -> None:
        self._loader.close()
        self._let_go()
