"""The checks of a writer before it starts a rollout or appends an event: which tries exist, and whose clock is ahead.

It looks up keys in the journals, under the run's lock, and in the shards' lists of rollouts. It does not use the index,
so a rollout can be started while the index is behind.
"""

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rolltape.errors import TapeError
from rolltape.extras import arrow_errors
from rolltape.records.rollout import EventKind, Status
from rolltape.tape.index.sources import RunSources
from rolltape.tape.journal.entries import event_crc
from rolltape.tape.journal.file import SELECT_FINISH, SELECT_TRIES, connected
from rolltape.tape.journal.writing import Journal
from rolltape.tape.rundir import Place, RunDirectory
from rolltape.tape.shards.reading import ShardSource
from rolltape.tape.stored import About, Key, about_of, check_shortage, decoded_event, read_errors

_EVENTS = "SELECT sequence, body, crc FROM events WHERE sequence BETWEEN ? AND ? ORDER BY sequence"
_LOOK_BACK = 256  # events: in 0.1.0, threads of one writer could write theirs in another order than they made them
_FAR_LOOK_S = 30.0
_MOST_HELD = 64  # journals: each takes up to three of the files that a process may open, often 1024


class OtherJournals:
    """The journals of a run's other writers. While it is held still, it does not look for new ones."""

    def __init__(self, directory: RunDirectory, own: Path) -> None:
        self._directory = directory
        self._own = own
        self._connections: dict[Path, sqlite3.Connection] = {}
        self._paths: list[Path] = []
        self._names: set[str] = set()
        self.is_still = False

    def paths(self) -> list[Path]:
        """The journals that exist now."""
        if self.is_still:
            return self._paths
        # By name, not as paths: this runs for every rollout, and there are seldom new journals.
        try:
            with os.scandir(self._directory.journals) as found:
                names = {one.name for one in found if one.name.endswith(".sqlite") and one.name != self._own.name}
        except FileNotFoundError:  # the run was moved: open rollouts continue in the journal that is open
            names = set()
        except OSError as error:
            check_shortage(error, self._directory.journals)
            raise
        if names != self._names:
            self._names, self._paths = names, [self._directory.journals / name for name in sorted(names)]
            for removed in self._connections.keys() - set(self._paths):
                self._connections.pop(removed).close()
        return self._paths

    @contextlib.contextmanager
    def held_still(self) -> Iterator[None]:
        """Look for no new journals within the block."""
        self.paths()
        self.is_still = True
        try:
            yield
        finally:
            self.is_still = False

    def select(self, path: Path, query: str, *values: str | int) -> list[Any]:
        """The rows of one journal for a query, or none if it cannot be read."""
        try:
            if path not in self._connections and len(self._connections) >= _MOST_HELD:
                with contextlib.closing(connected(path)) as connection:
                    return connection.execute(query, values).fetchall()
            if path not in self._connections:
                self._connections[path] = connected(path)
            return self._connections[path].execute(query, values).fetchall()
        except sqlite3.Error as error:  # readers report a damaged journal; it is no reason to stop
            if path.exists():
                check_shortage(error, path)
            return []


class FutureEvents:
    """Events of other writers whose clocks are ahead of ours: an event that we append later must sort after them.

    For each rollout it keeps the latest such time. All other events are in the past by our clock, so an event
    that is appended now sorts after them anyway.
    """

    def __init__(self, others: OtherJournals) -> None:
        self._others = others
        self._next: dict[Path, int] = {}  # the next event to read of each journal
        self._latest_ns: dict[str | None, int] = {}  # None: of the run

    def latest_ns(self, rollout: str | None) -> int:
        """The time of the latest event about a rollout, or (None) the run, if it is ahead of our clock; else 0."""
        return self._latest_ns.get(rollout, 0)

    def read_journals(self) -> None:
        """Read what was written into journals since the last time."""
        now_ns = time.time_ns()
        self._latest_ns = {rollout: at_ns for rollout, at_ns in self._latest_ns.items() if at_ns >= now_ns}
        for path in self._others.paths():
            if path not in self._next:
                self._next[path] = self._first(path, now_ns)
            for sequence, about in self._heads(path, self._next[path]):
                self._next[path] = sequence + 1
                self._note(about, now_ns)

    def read_shard(self, source: ShardSource) -> None:
        """Read the events of a shard."""
        now_ns = time.time_ns()
        if source.manifest.get("latest_ns", now_ns) >= now_ns:
            with contextlib.suppress(*read_errors()):
                for _, stored in source.numbered_events():
                    self._note(stored.about, now_ns)

    def _first(self, path: Path, now_ns: int) -> int:
        """The first event of a journal that may be ahead of our clock. Events are roughly in the order of time."""
        first = next((last + 1 for (last,) in self._others.select(path, "SELECT max(sequence) FROM events") if last), 0)
        while first and any(about.at_ns >= now_ns for _, about in self._heads(path, first - _LOOK_BACK, first - 1)):
            first = max(first - _LOOK_BACK, 0)
        return first

    def _heads(self, path: Path, first: int, last: int = 2**62) -> Iterator[tuple[int, About]]:
        for sequence, body, crc in self._others.select(path, _EVENTS, first, last):
            with contextlib.suppress(msgspec.MsgspecError, TypeError):
                if event_crc(sequence, body) == crc:
                    yield sequence, about_of(body)

    def _note(self, about: About, now_ns: int) -> None:
        if about.at_ns >= now_ns:
            self._latest_ns[about.rollout] = max(about.at_ns, self._latest_ns.get(about.rollout, 0))


class SealedTry(NamedTuple):
    """A try, how it ended (None: it has no finish), and the shard that holds it."""

    status: Status | None
    source: ShardSource


class SealedTries:
    """The tries in a run's shards, in a table in memory; `on_shard` is called with each shard once."""

    def __init__(self, directory: RunDirectory, on_shard: Callable[[ShardSource], None]) -> None:
        self._run = RunSources(directory, Place(directory.path), remote_look_s=_FAR_LOOK_S)
        self._on_shard = on_shard
        self._known: set[str] = set()  # the names of the shards that were looked at
        self._sources: list[ShardSource] = []
        self._tries = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._tries.execute(
            "CREATE TABLE tries (rollout TEXT, try_index INTEGER, shard INTEGER, status TEXT, "
            "PRIMARY KEY (rollout, try_index, shard)) WITHOUT ROWID"
        )

    def of(self, rollout: str) -> dict[int, SealedTry]:
        """The tries of a rollout in the shards that were found so far."""
        found: dict[int, SealedTry] = {}
        query = "SELECT try_index, shard, status FROM tries WHERE rollout = ? ORDER BY try_index, shard"
        for try_index, shard, status in self._tries.execute(query, (rollout,)) if self._sources else ():
            if try_index not in found or status is not None:  # a lost try may continue in another shard
                found[try_index] = SealedTry(status and Status(status), self._sources[shard])
        return found

    def holding(self, rollout: str) -> list[ShardSource]:
        """The shards that hold a try of a rollout."""
        rows = self._tries.execute("SELECT DISTINCT shard FROM tries WHERE rollout = ? ORDER BY shard", (rollout,))
        return [self._sources[shard] for (shard,) in rows]

    def look(self) -> None:
        """Look for new shards: on this machine each time, at remote places less often, since each look is a request."""
        for place in self._run.places():
            # Neither damage nor a place out of reach may stop the recording; readers report it.
            try:
                for source in self._run.shards_at(place, self._known):
                    if source.name not in self._known:
                        with contextlib.closing(source):
                            self._add(source)
                            self._on_shard(source)
                        self._known.add(source.name)
            except (TapeError, OSError) as error:
                check_shortage(error, place.url)

    def look_again(self) -> None:
        """Include remote places in the next look."""
        self._run.look_again()

    def _add(self, source: ShardSource) -> None:
        number = len(self._sources)
        try:
            found = [(*key, number, status and status.value) for key, status in source.statuses()]
        except arrow_errors(LookupError, ValueError, TypeError):
            return  # a damaged shard must not stop it either
        self._sources.append(source)
        self._tries.executemany("INSERT OR REPLACE INTO tries VALUES (?, ?, ?, ?)", found)


class LaunchCheck:
    """Looks up one rollout at a time in what all writers have written so far."""

    def __init__(self, directory: RunDirectory, own: Journal) -> None:
        self._own = own
        self._others = OtherJournals(directory, own.path)
        self._ahead = FutureEvents(self._others)
        self._sealed = SealedTries(directory, self._ahead.read_shard)

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Look at other writers once for many lookups in a row. For one thread."""
        self.latest_ns(None)
        with self._others.held_still():
            yield

    def look_again(self) -> None:
        """Include remote places in the next lookup."""
        self._sealed.look_again()

    def tries(self, rollout: str) -> list[int]:
        """The tries of a rollout anywhere in the run, in their order."""
        found = set(self._own.tries(rollout))
        # Journals before shards: a try that is sealed in the meantime is found in one of the two.
        for path in self._others.paths():
            found.update(row[0] for row in self._others.select(path, SELECT_TRIES, rollout))
        if not self._others.is_still:
            self._sealed.look()
        return sorted(found.union(self._sealed.of(rollout)))

    def shards_holding(self, rollout: str) -> list[ShardSource]:
        """The shards, found by the last look, that hold a try of a rollout."""
        return self._sealed.holding(rollout)

    def latest_ns(self, rollout: str | None) -> int:
        """The time of others' latest event about a rollout, or (None) the run, if it is ahead of our clock; else 0."""
        # The tape's own events are not read: each is made later than the one before.
        if not self._others.is_still:
            self._ahead.read_journals()
            self._sealed.look()
        return self._ahead.latest_ns(rollout)

    def counted_try(self, rollout: str, tries: list[int]) -> int:
        """The latest finished one of these tries, else the latest. Shards are those of the last look."""
        finished = (index for index in reversed(tries) if self._status_of((rollout, index)) == Status.FINISHED)
        return tries[-1] if len(tries) == 1 else next(finished, tries[-1])

    def turns_of(self, key: Key) -> tuple[int, ...] | None:
        """How many turns each session of a try has, or None if it has not ended as far as known here."""
        finish = self._finish_of(key)
        if finish is not None:
            return tuple(finish.get("turns", ()))
        sealed = self._sealed.of(key[0]).get(key[1])
        if sealed is None or sealed.status is None:
            return None
        with contextlib.closing(sealed.source) as source:
            row, _ = source.keys()[key]
            return source.counts(row).turns

    def _status_of(self, key: Key) -> str | None:
        finish = self._finish_of(key)
        if finish is not None:
            return str(finish.get("status"))
        sealed = self._sealed.of(key[0]).get(key[1])
        return None if sealed is None else sealed.status

    def _finish_of(self, key: Key) -> dict[str, Any] | None:
        """The data of the event that ended a try, if a journal has it."""
        for sequence, body, crc in self._finishes(key):
            with contextlib.suppress(ValueError, KeyError, TypeError, msgspec.MsgspecError):
                event = decoded_event("", sequence, body).event
                subject = (event.kind, event.rollout, event.try_index)
                if event_crc(sequence, body) == crc and subject == (EventKind.FINISH, *key):
                    return event.data
        return None

    def _finishes(self, key: Key) -> Iterator[Any]:
        yield from self._own.finish_of(*key)
        for path in self._others.paths():
            yield from self._others.select(path, SELECT_FINISH, *key)
