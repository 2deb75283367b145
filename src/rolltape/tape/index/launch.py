"""What a writer asks before it starts a rollout or appends an event: which tries there are, and how late it is.

It asks the journals by key, under the run's lock, and the shards by their lists of rollouts. It does not depend on the
index: a rollout can be started however far that is.
"""

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.errors import TapeError
from rolltape.extras import arrow_errors
from rolltape.records.rollout import EventKind, Status
from rolltape.tape.journal.entries import SELECT_FINISH, SELECT_TRIES, event_crc
from rolltape.tape.journal.writing import Journal
from rolltape.tape.rundir import Place, RunDirectory
from rolltape.tape.shards.reading import ShardSource, shards_at
from rolltape.tape.stored import About, Key, about_of, decoded_event, read_errors

_EVENTS = "SELECT sequence, body, crc FROM events WHERE sequence BETWEEN ? AND ? ORDER BY sequence"
_LOOK_BACK = 256  # events: in 0.1.0, threads of one writer could write theirs in another order than they made them
_FAR_LOOK_S = 30.0
_PLACE = np.dtype([("shard", "u4"), ("status", "u1")])
_STATUSES = (None, Status.FINISHED, Status.FAILED)
_ID_BYTES = 16
_FINISH = EventKind.FINISH


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


class FutureEvents:
    """What other writers have written by clocks ahead of ours: a later event of ours must not look like an earlier one.

    Per rollout it is the latest time by somebody's clock that has not come by ours. All other events are in the past by
    our clock, so whatever is appended now comes after them.
    """

    def __init__(self, others: OtherJournals) -> None:
        self._others = others
        self._next: dict[Path, int] = {}  # the next event to read of each journal
        self._latest_ns: dict[str | None, int] = {}  # None: of the run

    def latest_ns(self, rollout: str | None) -> int:
        """When somebody last spoke of a rollout, or (None) of the run, if that is still to come; else 0."""
        return self._latest_ns.get(rollout, 0)

    def listen(self) -> None:
        """Hear what was written into journals since the last time."""
        now_ns = time.time_ns()
        self._latest_ns = {rollout: at_ns for rollout, at_ns in self._latest_ns.items() if at_ns >= now_ns}
        for path in self._others.paths():
            if path not in self._next:
                self._next[path] = self._first(path, now_ns)
            for sequence, said in self._heads(path, self._next[path]):
                self._next[path] = sequence + 1
                self._hear(said, now_ns)

    def hear_shard(self, source: ShardSource) -> None:
        """Hear what a shard holds."""
        now_ns = time.time_ns()
        if source.manifest.get("latest_ns", now_ns) >= now_ns:
            with contextlib.suppress(*read_errors()):
                for _, stored in source.numbered_events():
                    self._hear(stored.about, now_ns)

    def _first(self, path: Path, now_ns: int) -> int:
        """From which event on those of a journal may be ahead: it is written in about the order of time."""
        first = next((last + 1 for (last,) in self._others.asked(path, "SELECT max(sequence) FROM events") if last), 0)
        while first and any(said.at_ns >= now_ns for _, said in self._heads(path, first - _LOOK_BACK, first - 1)):
            first = max(first - _LOOK_BACK, 0)
        return first

    def _heads(self, path: Path, first: int, last: int = 2**62) -> Iterator[tuple[int, About]]:
        for sequence, body, crc in self._others.asked(path, _EVENTS, first, last):
            with contextlib.suppress(msgspec.MsgspecError, TypeError):
                if event_crc(sequence, body) == crc:
                    yield sequence, about_of(body)

    def _hear(self, said: About, now_ns: int) -> None:
        if said.at_ns >= now_ns:
            self._latest_ns[said.rollout] = max(said.at_ns, self._latest_ns.get(said.rollout, 0))


class SealedTry(NamedTuple):
    """A try, how it ended (None: it has no finish), and the shard that holds it."""

    status: Status | None
    source: ShardSource


class SealedTries:
    """The tries in a run's shards, by rollout; `on_shard` is called with each shard once."""

    def __init__(self, directory: RunDirectory, on_shard: Callable[[ShardSource], None]) -> None:
        self._directory = directory
        self._on_shard = on_shard
        self._places: dict[str, Place] = {}
        self._looked_at: dict[str, float] = {}
        self._known: dict[str, set[str]] = {}  # the shards at each place that were looked at
        self._sources: list[ShardSource] = []
        self._arrays: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []  # keys in their order, and their places

    def of(self, rollout: str) -> dict[int, SealedTry]:
        """The tries of a rollout in the shards that were found so far."""
        found: dict[int, SealedTry] = {}
        for try_index, sealed in self._copies(rollout):
            if try_index not in found or sealed.status is not None:  # one that was lost may go on elsewhere
                found[try_index] = sealed
        return found

    def holding(self, rollout: str) -> list[ShardSource]:
        """The shards that hold a try of a rollout."""
        return list(dict.fromkeys(sealed.source for _, sealed in self._copies(rollout)))

    def _copies(self, rollout: str) -> Iterator[tuple[int, SealedTry]]:
        try:
            first, last = _packed_key(rollout, 0), _packed_key(rollout, 2**64 - 1)
        except ValueError:
            return
        for keys, places in self._arrays:
            start, stop = np.searchsorted(keys, first), np.searchsorted(keys, last, "right")
            for key, (shard, code) in zip(keys[start:stop], places[start:stop], strict=True):
                # numpy gives a key without the zeros at its end
                yield int.from_bytes(key[16:], "little"), SealedTry(_STATUSES[code], self._sources[shard])

    def look(self) -> None:
        """Look for new shards: here each time, at a far place now and then, since each look is a request."""
        for url in (str(self._directory.path), *self._directory.published()):
            if url not in self._places:
                self._places[url] = Place(url)
        for place in self._places.values():
            now = time.monotonic()
            if place.is_local or now - self._looked_at.get(place.url, -_FAR_LOOK_S) >= _FAR_LOOK_S:
                self._looked_at[place.url] = now
                self._look_at(place)

    def look_again(self) -> None:
        """Look at far places, too, the next time."""
        self._looked_at.clear()

    def _look_at(self, place: Place) -> None:
        known = self._known.setdefault(place.url, set())
        try:
            for source in shards_at(place, known)[0]:
                with contextlib.closing(source):
                    self._add(source)
                    self._on_shard(source)
                known.add(source.shard)
        except (TapeError, OSError):
            pass  # a place out of reach must not stop the recording; readers name it

    def _add(self, source: ShardSource) -> None:
        try:
            found = list(source.statuses())
        except arrow_errors(LookupError, ValueError, TypeError):
            return  # nor must damage
        places = np.empty(len(found), _PLACE)
        places["shard"], places["status"] = len(self._sources), [_STATUSES.index(status) for _, status in found]
        self._sources.append(source)
        self._arrays.append(_ordered(np.array([_packed_key(*key) for key, _ in found], "S24"), places))
        # Each is more than twice as large as the next: there are few to search, and each is copied a few times.
        while len(self._arrays) > 1 and len(self._arrays[-2][0]) <= 2 * len(self._arrays[-1][0]):
            keys, places = (np.concatenate(both) for both in zip(*self._arrays[-2:], strict=True))
            self._arrays[-2:] = [_ordered(keys, places)]


def _packed_key(rollout: str, try_index: int) -> bytes:
    """A rollout and try as one key; raises ValueError for what is no id of a rollout."""
    own_id = bytes.fromhex(rollout)
    if len(own_id) != _ID_BYTES:
        raise ValueError(f"{rollout!r} is no id of a rollout")
    return own_id + try_index.to_bytes(8, "little")


def _ordered(keys: npt.NDArray[Any], places: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    order = np.argsort(keys, kind="stable")
    return keys[order], places[order]


class LaunchCheck:
    """Answers for one rollout at a time, and sees what other writers have added meanwhile."""

    def __init__(self, directory: RunDirectory, own: Journal) -> None:
        self._own = own
        self._others = OtherJournals(directory, own.path)
        self._ahead = FutureEvents(self._others)
        self._sealed = SealedTries(directory, self._ahead.hear_shard)
        self._is_still = False

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Look once for many answers in a row: what others say meanwhile is not heard. Not for several threads."""
        self.latest_ns(None)
        self._others.hold_still(True)
        self._is_still = True
        try:
            yield
        finally:
            self._is_still = False
            self._others.hold_still(False)

    def look_again(self) -> None:
        """Look at far places, too, the next time that something is asked."""
        self._sealed.look_again()

    def tries(self, rollout: str) -> list[int]:
        """The tries of a rollout anywhere in the run, in their order."""
        found = set(self._own.tries(rollout))
        # Journals before shards: what is sealed and removed meanwhile is then found in one of the two.
        for path in self._others.paths():
            found.update(row[0] for row in self._others.asked(path, SELECT_TRIES, rollout))
        if not self._is_still:
            self._sealed.look()
        return sorted(found.union(self._sealed.of(rollout)))

    def shards_holding(self, rollout: str) -> list[ShardSource]:
        """The shards, found by the last look, that hold a try of a rollout."""
        return self._sealed.holding(rollout)

    def latest_ns(self, rollout: str | None) -> int:
        """When others last spoke of a rollout, or (None) of the run, if that is still to come by our clock; else 0."""
        # The tape's own events need no reading: it makes each later than the one before.
        if not self._is_still:
            self._ahead.listen()
            self._sealed.look()
        return self._ahead.latest_ns(rollout)

    def counted_try(self, rollout: str, tries: list[int]) -> int:
        """The latest finished one of these tries, else the latest. Shards are those of the last look."""
        finished = (index for index in reversed(tries) if self._status_of((rollout, index)) == Status.FINISHED)
        return tries[-1] if len(tries) == 1 else next(finished, tries[-1])

    def turns_of(self, key: Key) -> tuple[int, ...] | None:
        """How many turns each session of a try has; None: it has not ended, as far as is known here."""
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
        """What was said when a try ended, if that is in a journal."""
        for sequence, body, crc in self._finishes(key):
            with contextlib.suppress(ValueError, KeyError, TypeError, msgspec.MsgspecError):
                event = decoded_event("", sequence, body).event
                if event_crc(sequence, body) == crc and (event.kind, event.rollout, event.try_index) == (_FINISH, *key):
                    return event.data
        return None

    def _finishes(self, key: Key) -> Iterator[Any]:
        yield from self._own.finish_of(*key)
        for path in self._others.paths():
            yield from self._others.asked(path, SELECT_FINISH, *key)
