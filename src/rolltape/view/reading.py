"""One run, read for its summaries and its search index."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from rolltape.errors import RolltapeError
from rolltape.records.policy import Policy
from rolltape.view.loading import Loader
from rolltape.view.reports import Derived, Wanted
from rolltape.view.search import SearchIndex
from rolltape.view.summary import summary_of


class Reading:
    """Loads rollouts that have ended, and tells what they come to. For one thread."""

    def __init__(self, location: str, folder: Path, policy: Policy, *, search: bool = True) -> None:
        self._policy = policy
        self._loader = Loader(location)
        self._index: SearchIndex | None = None
        if search:
            # Another server that watches the same run may write it; then that one does.
            with contextlib.suppress(OSError):
                self._index = SearchIndex(folder)

    @property
    def searchable(self) -> bool:
        """Whether the search index is written here."""
        return self._index is not None

    def read(self, wanted: Sequence[Wanted]) -> Iterator[Derived]:
        """What each rollout comes to; one that cannot be read comes to nothing."""
        for one in wanted:
            try:
                yield self._read(one)
            except (RolltapeError, OSError):
                yield Derived(one.key, None, None)
            except Exception:  # noqa: BLE001 - what a recorded message may hold has no end, nor the ways it can fail
                yield Derived(one.key, None, None)
        if self._index is not None:
            self._index.commit()

    def _read(self, wanted: Wanted) -> Derived:
        rollout = self._loader.load(wanted.key, wanted.place, wanted.spots, alive=False)
        number = None
        if wanted.search and self._index is not None:
            number = self._index.add(rollout)
        return Derived(wanted.key, summary_of(rollout, self._policy) if wanted.summary else None, number)

    def close(self) -> None:
        self._loader.close()
        if self._index is not None:
            self._index.close()
