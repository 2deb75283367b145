"""A rollout loaded from where reports say that it lies, without listing the run."""

import contextlib
import sqlite3
from collections.abc import Iterable, Sequence

import pyarrow as pa

from rolltape.errors import DamagedTapeError, TapeError
from rolltape.records.rollout import Event, EventKind, Rollout
from rolltape.tape.index.stretches import JournalStretches, Stretches
from rolltape.tape.repair.rebuild import pruned_of, rebuilt
from rolltape.tape.stored import Problem, StoredEvent
from rolltape.view.following import RunPlaces
from rolltape.view.reports import Key, Place, Spot

_SOURCES_HELD = 4
_GONE = (TapeError, OSError, sqlite3.Error, KeyError, ValueError, TypeError, pa.ArrowException)


class Loader:
    """Loads rollouts of one run, and keeps the sources open that it read last. For one thread."""

    def __init__(self, location: str) -> None:
        self._location = location
        self._places = RunPlaces(location)
        self._held: dict[str, Stretches] = {}

    def load(self, key: Key, place: Place, spots: Sequence[Spot], *, alive: bool) -> tuple[Rollout, list[Problem]]:
        """A rollout with all that is said of it, and what is missing; raises DamagedTapeError if it does not lie there
        any more."""
        for fresh in (False, True):
            try:
                rollout, problems = self._loaded(key, place, spots, alive=alive, fresh=fresh)
            except _GONE as error:
                failure = error
                continue
            # What is missing may be so because the file was replaced by another meanwhile.
            if fresh or not problems:
                return rollout, problems
        raise DamagedTapeError(f"rollout {key[0]}: {failure}") from failure

    def _loaded(
        self, key: Key, place: Place, spots: Sequence[Spot], *, alive: bool, fresh: bool
    ) -> tuple[Rollout, list[Problem]]:
        source = self._source(place.source, fresh=fresh)
        head = source.head(place.row)
        if head is None or head.key != key:
            raise DamagedTapeError(f"rollout {key[0]} is not in row {place.row} of {place.source}")
        writer = source.writer if isinstance(source, JournalStretches) else source.counts(place.row)[0]
        found = {stored.key: stored for stored in self._own_events(source, key, place)}
        for spot in spots:
            for _, stored in self._source(spot.source, fresh=False).said(spot.number, spot.number):
                if (stored.writer, stored.sequence) == (spot.writer, spot.sequence):
                    found[stored.key] = stored
        events = _counting(found.values(), writer)
        sessions = [] if "turns" in pruned_of(events) else source.stored(place.row, head, place.sessions)
        return rebuilt(head, sessions, events, alive, source.where, self._location)

    def _own_events(self, source: Stretches, key: Key, place: Place) -> Iterable[StoredEvent]:
        return (stored for _, stored in source.said(*place.events) if stored.about.key == key)

    def _source(self, name: str, *, fresh: bool) -> Stretches:
        if fresh and name in self._held:
            self._held.pop(name).close()
        if name not in self._held:
            if len(self._held) >= _SOURCES_HELD:
                self._held.pop(next(iter(self._held))).close()
            self._held[name] = self._places.open(name)
        return self._held[name]

    def close(self) -> None:
        """Let go of all files."""
        for source in self._held.values():
            with contextlib.suppress(OSError):
                source.close()
        self._held.clear()


def _counting(stored: Iterable[StoredEvent], writer: str) -> list[Event]:
    """The events in their order; only its own writer finishes a rollout."""
    counting = (one for one in stored if one.about.kind != EventKind.FINISH or one.writer == writer)
    return [one.event for one in sorted(counting, key=lambda one: one.order)]
