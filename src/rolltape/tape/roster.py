"""Which rollouts a run has, asked by one that wants to start another: own journal, other writers', shards."""

import contextlib
import sqlite3
import time
from pathlib import Path

from rolltape.errors import TapeError
from rolltape.tape.journal import Journal
from rolltape.tape.places import Place
from rolltape.tape.rundir import RunDirectory
from rolltape.tape.shardfile import ShardSource, shards_at

_FAR_LOOK_S = 30.0


class Roster:
    """Answers for one id at a time, and sees what other writers have added meanwhile."""

    def __init__(self, directory: RunDirectory, own: Journal) -> None:
        self._directory = directory
        self._own = own
        self._others: dict[Path, sqlite3.Connection] = {}
        self._shards: dict[tuple[str, str], dict[str, int]] = {}
        self._places: dict[str, Place] = {}
        self._looked_at: dict[str, float] = {}

    def highest_try(self, rollout: str) -> int | None:
        """The last try of a rollout anywhere in the run; None: the run has none."""
        found = [self._own.highest_try(rollout)]
        # Journals before shards: what is sealed and removed meanwhile is then found in one of the two.
        others = [path for path in self._directory.journal_paths() if path != self._own.path]
        for removed in self._others.keys() - set(others):
            self._others.pop(removed).close()
        found += [self._asked(path, rollout) for path in others]
        found += [tries.get(rollout) for tries in self._sealed()]
        return max((one for one in found if one is not None), default=None)

    def _asked(self, path: Path, rollout: str) -> int | None:
        with contextlib.suppress(sqlite3.Error):  # a damaged journal is for readers to name, not a reason to stop
            if path not in self._others:
                self._others[path] = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, check_same_thread=False)
                self._others[path].execute("PRAGMA busy_timeout = 10000")
            query = "SELECT max(try_index) FROM rollouts WHERE id = ?"
            (last,) = self._others[path].execute(query, (rollout,)).fetchone()
            return None if last is None else int(last)
        return None

    def _sealed(self) -> list[dict[str, int]]:
        for url in (str(self._directory.path), *self._directory.published()):
            if url not in self._places:
                self._places[url] = Place(url)
        return [tries for place in self._places.values() for tries in self._sealed_at(place)]

    def _sealed_at(self, place: Place) -> list[dict[str, int]]:
        if self._is_due(place):
            self._look_at(place)
        return [tries for (url, _), tries in self._shards.items() if url == place.url]

    def _is_due(self, place: Place) -> bool:
        """Local shards are looked for each time; a far place only now and then, since each look is a request."""
        now = time.monotonic()
        if not place.is_local and now - self._looked_at.get(place.url, -_FAR_LOOK_S) < _FAR_LOOK_S:
            return False
        self._looked_at[place.url] = now
        return True

    def _look_at(self, place: Place) -> None:
        known = {shard for url, shard in self._shards if url == place.url}
        try:
            if known != set(place.shard_ids()):
                for source in shards_at(place)[0]:
                    if source.shard not in known:
                        self._shards[place.url, source.shard] = _tries(source)
        except (TapeError, OSError):
            pass  # a place out of reach must not stop the recording; readers name it


def _tries(source: ShardSource) -> dict[str, int]:
    tries: dict[str, int] = {}
    for rollout, try_index in source.writers:
        tries[rollout] = max(try_index, tries.get(rollout, 0))
    source.close()
    return tries
