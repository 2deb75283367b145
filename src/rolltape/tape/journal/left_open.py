"""Sessions that a writer had left open when it died, by the digests that their heads keep under `extra.found_by`.

A program that serves sessions stores there the digests of the keys and names by which clients will ask for them again.
It never stores the keys themselves.
"""

import contextlib
import sqlite3
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rolltape.errors import DamagedTapeError
from rolltape.records.rollout import EventKind
from rolltape.records.turn import Delivery
from rolltape.tape.journal.entries import event_crc
from rolltape.tape.journal.fences import JournalPart, find_part
from rolltape.tape.journal.file import connected, is_alive
from rolltape.tape.rundir import RunDirectory
from rolltape.tape.stored import Key, decoded_event

FOUND_BY = "found_by"
_OPEN_SESSIONS = (
    "SELECT rollouts.id, try_index, ordinal, sessions.head FROM sessions "
    "JOIN rollouts ON rollouts.pk = sessions.rollout "
    "LEFT JOIN ends ON ends.rollout = rollouts.pk WHERE ends.finish IS NULL ORDER BY sessions.pk"
)
# In a body, the kind comes right after the time, and no text comes before it.
_DELIVERIES = (
    'SELECT sequence, body, crc FROM events WHERE instr(substr(CAST(body AS TEXT), 1, 64), \'"kind":"delivery"\') '
    "ORDER BY sequence"
)


class LeftSession(NamedTuple):
    """A session whose rollout had not ended in a journal."""

    rollout: str
    try_index: int
    ordinal: int
    fingerprint: str | None  # of the tokenizer and chat template of its turns

    @property
    def key(self) -> Key:
        return (self.rollout, self.try_index)


class LeftOpen:
    """What the journal of a dead writer holds of rollouts that have not ended. It cannot change, so it is read once."""

    def __init__(self, path: Path) -> None:
        """Raises DamagedTapeError if it cannot be read."""
        self.sessions: dict[str, list[LeftSession]] = defaultdict(list)
        self.deliveries: dict[Key, dict[str, Delivery]] = defaultdict(dict)  # by rollout, then by turn
        try:
            with contextlib.closing(connected(path)) as connection:
                self._read_sessions(connection)
                if self.sessions:
                    self._read_deliveries(connection)
        except (sqlite3.Error, ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
            raise DamagedTapeError(f"journal {path}: {error}") from error

    def _read_sessions(self, connection: sqlite3.Connection) -> None:
        for rollout, try_index, ordinal, raw in connection.execute(_OPEN_SESSIONS):
            head: dict[str, Any] = msgspec.json.decode(raw)
            fingerprint = head.get("defaults", {}).get("fingerprint")
            for digest in head.get("extra", {}).get(FOUND_BY, ()):
                self.sessions[digest].append(LeftSession(rollout, try_index, ordinal, fingerprint))

    def _read_deliveries(self, connection: sqlite3.Connection) -> None:
        left = {one.key for several in self.sessions.values() for one in several}
        for sequence, body, crc in connection.execute(_DELIVERIES):
            event = decoded_event("", sequence, body).event if event_crc(sequence, body) == crc else None
            if event is None or event.kind != EventKind.DELIVERY or event.turn is None:
                continue
            if event.rollout is not None and (key := (event.rollout, event.try_index or 0)) in left:
                self.deliveries[key][event.turn] = Delivery(event.data["delivery"])


class OtherWriters:
    """The other writers of a run: which exist, which are alive, and what the dead ones left open."""

    def __init__(self, directory: RunDirectory, own: str) -> None:
        self._directory = directory
        self._own = own
        self._seen_ns = -1
        self._by_tag: dict[str, Path] = {}
        self._left: dict[Path, LeftOpen] = {}

    def of_tag(self, tag: str) -> Path | None:
        """The journal of the writer whose name ends with `tag`, or None."""
        return self._journals().get(tag)

    def dead(self) -> list[Path]:
        """The journals of all writers that have died or ended."""
        return [path for path in self._journals().values() if not is_alive(path)]

    def loaded(self, path: Path) -> LeftOpen | None:
        """What a dead writer left, if it was read already."""
        return self._left.get(path)

    def left_open(self, path: Path) -> LeftOpen:
        """What a dead writer left."""
        if path not in self._left:
            self._left[path] = LeftOpen(path)
        return self._left[path]

    def owner(self, key: Key) -> JournalPart | None:
        """The last part of a rollout among all journals, or None if no journal has it."""
        return max(self._parts(key), key=lambda part: part.head.epoch, default=None)

    def deliveries(self, key: Key) -> dict[str, Delivery]:
        """What dead writers recorded of the deliveries of a rollout, by turn."""
        found: dict[str, Delivery] = {}
        for part in self._parts(key):
            if part.writer != self._own:
                found |= self.left_open(part.path).deliveries.get(key, {})
        return found

    def _parts(self, key: Key) -> list[JournalPart]:
        """The parts of a rollout in all journals, in the order of their epochs."""
        found: list[JournalPart] = []
        for path in self._directory.journal_paths():
            with contextlib.suppress(DamagedTapeError):  # a takeover reports it, if it needs that journal
                found += [part for part in [find_part(path, key)] if part is not None]
        return sorted(found, key=lambda part: part.head.epoch)

    def _journals(self) -> dict[str, Path]:
        changed_ns = self._directory.journals.stat().st_mtime_ns
        if changed_ns != self._seen_ns:
            self._seen_ns = changed_ns
            paths = [path for path in self._directory.journal_paths() if path.stem != self._own]
            self._by_tag = {writer_tag(path.stem): path for path in paths}
        return self._by_tag


def writer_tag(writer: str) -> str:
    """The random end of a writer's name. A session key contains it to name the writer that made it."""
    return writer.rpartition("-")[2]
