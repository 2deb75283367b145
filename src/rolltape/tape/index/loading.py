"""A rollout loaded from where the index says that it lies."""

import contextlib
import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import pyarrow as pa

from rolltape.errors import DamagedTapeError, TapeError
from rolltape.records.messages import Message
from rolltape.records.rollout import Event, EventKind, Rollout, RolloutHead
from rolltape.tape.index.sources import Reader, RunSources
from rolltape.tape.journal.reading import JournalSource
from rolltape.tape.parts import join_sessions
from rolltape.tape.repair.rebuild import pruned_of, rebuilt
from rolltape.tape.stored import Key, Problem, StoredEvent, StoredSession

_SOURCES_HELD = 8
_GONE = (TapeError, OSError, sqlite3.Error, KeyError, IndexError, ValueError, TypeError, pa.ArrowException)


class PartPlace(NamedTuple):
    """Where the part of a rollout lies that one writer recorded."""

    source: str
    row: int
    first_event: int
    last_event: int
    writer: str
    has_turns: bool = True  # to be read from there; else just what was said of the rollout


class Located(NamedTuple):
    """A rollout in its run: its parts, the last one that of its owner, and what is said of it elsewhere."""

    key: Key
    parts: tuple[PartPlace, ...]
    apart: tuple[StoredEvent, ...]
    alive: bool


class Loader:
    """Loads rollouts of one run, and keeps the sources open that it read last. For one thread at a time."""

    def __init__(self, sources: RunSources, location: str) -> None:
        self._sources = sources
        self._location = location
        self._held: dict[str, Reader] = {}

    def load(self, located: Located) -> tuple[Rollout, list[Problem]]:
        """A rollout with all that is said of it, and what is missing of it.

        Raises DamagedTapeError if it does not lie there any more, as when it was sealed meanwhile.
        """
        for fresh in (False, True):
            try:
                rollout, problems = self._loaded(located, fresh=fresh)
            except _GONE as error:
                failure = error
                continue
            # What is missing may be so because the file was replaced by another meanwhile.
            if fresh or not problems:
                return rollout, problems
        raise DamagedTapeError(f"rollout {located.key[0]}: {failure}") from failure

    def messages(self, located: Located) -> list[Message]:
        """Each message of a rollout once, in the order in which they came, without its tokens.

        Raises DamagedTapeError if it does not lie there any more. What of it is damaged is left out.
        """
        found: dict[bytes, Message] = {}
        try:
            for part in located.parts:
                source = self._source(part.source, fresh=False)
                self._head(source, part, located.key)
                for message in source.messages(part.row):
                    found.setdefault(message.digest, message)
        except _GONE as error:
            raise DamagedTapeError(f"rollout {located.key[0]}: {error}") from error
        return list(found.values())

    def close(self) -> None:
        """Let go of all files."""
        for source in self._held.values():
            with contextlib.suppress(OSError, sqlite3.Error):
                source.close()
        self._held.clear()

    def _loaded(self, located: Located, *, fresh: bool) -> tuple[Rollout, list[Problem]]:
        owner = located.parts[-1]
        head: RolloutHead | None = None
        found = {stored.key: stored for stored in located.apart}
        sessions: list[StoredSession] = []
        problems: list[Problem] = []
        for part in located.parts:
            source = self._source(part.source, fresh=fresh)
            head = self._head(source, part, located.key)
            before = set(source.problems())
            first = part.first_event
            if isinstance(source, JournalSource) and part.last_event < first:
                first = source.first_event_since(head.started_at_ns)
            last = part.last_event if part is not owner or not located.alive else source.last_event()
            for _, stored in source.numbered_events(first, last) if last >= first else ():
                if stored.about.key == located.key:
                    found[stored.key] = stored
            if part.has_turns:
                sessions = join_sessions([sessions, source.stored(part.row, head)])
            problems += [one for one in source.problems() if one not in before]
        assert head is not None
        events = counted_events(found.values(), owner.writer)
        pruned = pruned_of(events)
        where = self._source(owner.source, fresh=False).where
        rollout, missing = rebuilt(
            head,
            [_less_pruned(session, pruned) for session in sessions],
            events,
            located.alive,
            where,
            self._location,
        )
        return rollout, [*problems, *missing]

    def _head(self, source: Reader, part: PartPlace, key: Key) -> RolloutHead:
        found = next(iter(source.heads(part.row, part.row)), None)
        if found is None or found.head.key != key:
            raise DamagedTapeError(f"rollout {key[0]} is not in row {part.row} of {part.source}")
        return found.head

    def _source(self, name: str, *, fresh: bool) -> Reader:
        if fresh and name in self._held:
            self._held.pop(name).close()
        if name not in self._held:
            if len(self._held) >= _SOURCES_HELD:
                self._held.pop(next(iter(self._held))).close()
            self._held[name] = self._sources.open(name)
        return self._held[name]


def counted_events(stored: Iterable[StoredEvent], owner: str) -> list[Event]:
    """The events of a rollout in their order; only its owner finishes it."""
    counted = [one for one in stored if one.about.kind != EventKind.FINISH or one.writer == owner]
    return [one.event for one in sorted(counted, key=lambda one: one.order)]


def _less_pruned(session: StoredSession, pruned: tuple[str, ...]) -> StoredSession:
    """What was pruned is gone for readers at once, also from copies that a live writer still holds."""
    if "turns" in pruned:
        return StoredSession(session.head, session.ordinal, [])
    gone = {one.removeprefix("side array ") for one in pruned}
    if not gone:
        return session
    turns = [
        msgspec.structs.replace(turn, side={name: side for name, side in turn.side.items() if name not in gone})
        for turn in session.turns
    ]
    return StoredSession(session.head, session.ordinal, turns)
