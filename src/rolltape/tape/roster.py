"""Which rollouts a run has and what was said of them, asked by one that wants to start another or to say more: own
journal, other writers', shards."""

import contextlib
import sqlite3
import time
from pathlib import Path
from typing import Any

import msgspec

from rolltape.errors import TapeError
from rolltape.records.rollout import Event, EventKind, Status
from rolltape.tape.journal import Journal
from rolltape.tape.places import Place
from rolltape.tape.rundir import RunDirectory
from rolltape.tape.schema import SELECT_TRIES, row_crc
from rolltape.tape.shardfile import ShardSource, shards_at
from rolltape.tape.stored import Key, decoded_event

_FAR_LOOK_S = 30.0


class Ended(msgspec.Struct, frozen=True):
    """How a try ended."""

    finished: bool
    turns: tuple[int, ...]  # per session


class Roster:
    """Answers for one id at a time, and sees what other writers have added meanwhile."""

    def __init__(self, directory: RunDirectory, own: Journal) -> None:
        self.ended: dict[Key, Ended] = {}
        self._directory = directory
        self._own = own
        self._others: dict[Path, sqlite3.Connection] = {}
        self._heard: dict[Path, int] = {}  # the next event to read of each other journal
        self._latest_ns: dict[str | None, int] = {}  # per rollout, of what others said; None: of the run
        self._shards: dict[tuple[str, str], dict[str, list[int]]] = {}
        self._unheard: list[ShardSource] = []
        self._places: dict[str, Place] = {}
        self._looked_at: dict[str, float] = {}

    def tries(self, rollout: str) -> list[int]:
        """The tries of a rollout anywhere in the run, in their order."""
        found = set(self._own.tries(rollout))
        # Journals before shards: what is sealed and removed meanwhile is then found in one of the two.
        for path in self._other_journals():
            found.update(row[0] for row in self._asked(path, SELECT_TRIES, rollout))
        for tries in self._sealed():
            found.update(tries.get(rollout, ()))
        return sorted(found)

    def latest_ns(self, rollout: str | None) -> int:
        """When others last spoke of a rollout, or (None) of the run, by their clocks; 0: they did not."""
        # The tape's own events need no reading: it makes each later than the one before.
        for path in self._other_journals():
            start = self._heard.get(path, 0)
            query = "SELECT sequence, body, crc FROM events WHERE sequence >= ? ORDER BY sequence"
            for sequence, body, crc in self._asked(path, query, start):
                self._heard[path] = sequence + 1
                with contextlib.suppress(ValueError, KeyError, TypeError, msgspec.MsgspecError):
                    if row_crc(sequence, body) == crc:
                        self._hear(decoded_event(path.stem, sequence, body).event)
        self._sealed()
        while self._unheard:
            source = self._unheard.pop()
            with contextlib.suppress(TapeError, OSError):
                for stored in source.events():
                    self._hear(stored.event)
            source.close()
        return self._latest_ns.get(rollout, 0)

    def counted_try(self, rollout: str, tries: list[int]) -> int:
        """The latest finished one of these tries, else the latest. What others said is that of the last look."""
        ended = {index: self.ended.get((rollout, index)) for index in tries}
        return max((index for index, end in ended.items() if end and end.finished), default=tries[-1])

    def _hear(self, event: Event) -> None:
        self._latest_ns[event.rollout] = max(event.at_ns, self._latest_ns.get(event.rollout, 0))
        if event.kind == EventKind.FINISH and event.rollout is not None and event.try_index is not None:
            ended = Ended(event.data.get("status") == Status.FINISHED, tuple(event.data.get("turns", ())))
            self.ended.setdefault((event.rollout, event.try_index), ended)

    def _other_journals(self) -> list[Path]:
        others = [path for path in self._directory.journal_paths() if path != self._own.path]
        for removed in self._others.keys() - set(others):
            self._others.pop(removed).close()
        return others

    def _asked(self, path: Path, query: str, value: str | int) -> list[Any]:
        with contextlib.suppress(sqlite3.Error):  # a damaged journal is for readers to name, not a reason to stop
            if path not in self._others:
                self._others[path] = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, check_same_thread=False)
                self._others[path].execute("PRAGMA busy_timeout = 10000")
            return self._others[path].execute(query, (value,)).fetchall()
        return []

    def _sealed(self) -> list[dict[str, list[int]]]:
        for url in (str(self._directory.path), *self._directory.published()):
            if url not in self._places:
                self._places[url] = Place(url)
        for place in self._places.values():
            if self._is_due(place):
                self._look_at(place)
        return list(self._shards.values())

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
                        self._unheard.append(source)
        except (TapeError, OSError):
            pass  # a place out of reach must not stop the recording; readers name it


def _tries(source: ShardSource) -> dict[str, list[int]]:
    tries: dict[str, list[int]] = {}
    for rollout, try_index in source.writers:
        tries.setdefault(rollout, []).append(try_index)
    source.close()
    return tries
