"""The journals of a run's other writers, asked while these write them."""

import contextlib
import os
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
        self._paths: list[Path] = []
        self._names: set[str] = set()
        self._is_still = False

    def paths(self) -> list[Path]:
        """Those that there are now."""
        if self._is_still:
            return self._paths
        # By name, and not as paths each time: they are looked for with every rollout, and seldom others than before.
        with os.scandir(self._directory.journals) as found:
            names = {one.name for one in found if one.name.endswith(".sqlite") and one.name != self._own.name}
        if names != self._names:
            self._names, self._paths = names, [self._directory.journals / name for name in sorted(names)]
            for removed in self._connections.keys() - set(self._paths):
                self._connections.pop(removed).close()
        return self._paths

    def hold_still(self, still: bool) -> None:
        """Look for new ones no more, or again."""
        if still:
            self.paths()
        self._is_still = still

    def asked(self, path: Path, query: str, *values: str | int) -> list[Any]:
        """The rows of one; none of one that cannot be read."""
        with contextlib.suppress(sqlite3.Error):  # a damaged journal is for readers to name, not a reason to stop
            if path not in self._connections:
                connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, check_same_thread=False)
                self._connections[path] = connection
                connection.execute("PRAGMA busy_timeout = 10000")
            return self._connections[path].execute(query, values).fetchall()
        return []
