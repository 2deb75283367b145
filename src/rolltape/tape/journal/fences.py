"""Takes a rollout from the writer of another journal, and reads what that journal holds of it.

The fence is a row in the old writer's own journal. That writer checks for it in each transaction. So a writer that was
stopped at any instruction and later continues adds nothing to a rollout that was taken over.
"""

import contextlib
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rolltape.errors import DamagedTapeError, RecordError
from rolltape.records.jsonable import decode_record
from rolltape.records.rollout import RolloutHead
from rolltape.tape.journal.entries import row_crc
from rolltape.tape.journal.file import FENCES, connected, described, is_alive
from rolltape.tape.journal.reading import JournalSource
from rolltape.tape.stored import Key, StoredSession

_SELECT_PART = (
    "SELECT pk, head, crc, ends.finish FROM rollouts LEFT JOIN ends ON ends.rollout = rollouts.pk "
    "WHERE id = ? AND try_index = ?"
)


class Fence(NamedTuple):
    """The writer that took a rollout over, and the rollout's epoch since then."""

    epoch: int
    taker: str


class JournalPart(NamedTuple):
    """What a journal holds of one rollout, without its sessions."""

    path: Path
    pk: int
    head: RolloutHead
    ended: bool
    fence: Fence | None

    @property
    def writer(self) -> str:
        return self.path.stem


def fences_in(connection: sqlite3.Connection) -> dict[Key, Fence]:
    """The rollouts that were taken from a journal's writer."""
    if not _has_fences(connection):
        return {}
    rows = connection.execute("SELECT rollout, try_index, epoch, taker FROM fences").fetchall()
    return {(rollout, try_index): Fence(epoch, taker) for rollout, try_index, epoch, taker in rows}


def read_fences(path: Path) -> dict[Key, Fence]:
    """The rollouts that were taken from the writer of the journal at `path`; none if it cannot be read."""
    with contextlib.suppress(sqlite3.Error), contextlib.closing(connected(path)) as connection:
        return fences_in(connection)
    return {}


def find_part(path: Path, key: Key) -> JournalPart | None:
    """What the journal at `path` holds of a rollout, or None. Raises DamagedTapeError if it cannot be read."""
    with _naming(path), contextlib.closing(connected(path)) as connection:
        for pk, raw, crc, finish in connection.execute(_SELECT_PART, key):
            if row_crc(pk, *key, raw) != crc:
                raise DamagedTapeError(f"row {pk} of rollouts is damaged")
            head = decode_record(raw, RolloutHead, f"rollout {key[0]}")
            return JournalPart(path, pk, head, finish is not None, fences_in(connection).get(key))
    return None


def load_part(part: JournalPart) -> list[StoredSession]:
    """The sessions of a rollout in a journal that is no longer written. Raises DamagedTapeError for a bad one."""
    with _naming(part.path), contextlib.closing(JournalSource(part.path)) as source:
        return _sessions_in(source, part)


def take_part(part: JournalPart, fence: Fence, *, force: bool) -> list[StoredSession]:
    """Set the fence, then load the sessions that the old writer had recorded until then.

    The writer must be dead, unless `force` is given; then its version must be one that checks for fences.
    """
    alive = is_alive(part.path)
    if alive and not force:
        raise RecordError(
            f"rollout {part.head.id} (try {part.head.try_index}) is being recorded by {described(part.writer)}, which "
            'is alive; wait for it, or end it and resume then. If it hangs, resume="force" takes the rollout from it'
        )
    # Closed after the writing connection: the last connection to close must be read-only, so that SQLite keeps the log
    # (-wal). A reader would take its absence for a loss.
    with _naming(part.path), contextlib.closing(JournalSource(part.path)) as source:
        _refuse_damage(source)  # to write to a journal whose log is torn would destroy what can still be read
        with contextlib.closing(connected(part.path, "rw")) as writing:
            if alive and not _has_fences(writing):
                raise RecordError(f"{described(part.writer)} runs version 0.1.0, which cannot be refused; end it first")
            _set_fence(writing, part, fence)
        return _sessions_in(source, part)


def _set_fence(connection: sqlite3.Connection, part: JournalPart, fence: Fence) -> None:
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("PRAGMA synchronous = NORMAL")  # a fence keeps out a process, which a loss of power ends as well
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        raise RecordError(
            f"rollout {part.head.id} (try {part.head.try_index}) cannot be taken over: {described(part.writer)} holds "
            f"the write lock of {part.path} ({error}); end that process, and resume then"
        ) from error
    connection.execute(FENCES)
    connection.execute("INSERT OR REPLACE INTO fences VALUES (?, ?, ?, ?)", (*part.head.key, *fence))
    connection.execute("COMMIT")


def _sessions_in(source: JournalSource, part: JournalPart) -> list[StoredSession]:
    sessions = source.stored(part.pk, part.head)
    _refuse_damage(source)
    return sorted(sessions, key=lambda session: session.ordinal)


def _refuse_damage(source: JournalSource) -> None:
    if source.problems():
        raise DamagedTapeError(f"{source.problems()[0]}; see `rolltape check`")


def _has_fences(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'fences'").fetchone()[0])


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the journal in an error if it cannot be read."""
    try:
        yield
    except (DamagedTapeError, sqlite3.Error, ValueError, TypeError, OverflowError, struct.error) as error:
        raise DamagedTapeError(f"journal {path}: {error}") from error
