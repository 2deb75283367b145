"""The journals of a run's other writers, asked while these write them."""

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

from rolltape.tape.rundir import RunDirectory


class OtherJournals:
    """All journals of a run but one's own. Held still, it is those that there were then."""

    def __init__(self, directory: RunDirectory, own: Path) -> None:
        self._directory = directory
        self._own = own
        self._connections: dict[Path, sqlite3.Connection] = {}
        self._still: list[Path] | None = None

    def paths(self) -> list[Path]:
        """Those that there are now."""
        if self._still is not None:
            return self._still
        others = [path for path in self._directory.journal_paths() if path != self._own]
        for removed in self._connections.keys() - set(others):
            self._connections.pop(removed).close()
        return others

    def hold_still(self, still: bool) -> None:
        """Look for new ones no more, or again."""
        self._still = None
        self._still = self.paths() if still else None

    def asked(self, path: Path, query: str, *values: str | int) -> list[Any]:
        """The rows of one; none of one that cannot be read."""
        with contextlib.suppress(sqlite3.Error):  # a damaged journal is for readers to name, not a reason to stop
            if path not in self._connections:
                connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, check_same_thread=False)
                self._connections[path] = connection
                connection.execute("PRAGMA busy_timeout = 10000")
            return self._connections[path].execute(query, values).fetchall()
        return []
