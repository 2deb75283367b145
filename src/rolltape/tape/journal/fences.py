"""Taking a rollout from the writer of another journal, and reading what that journal holds of it.

The fence is a row in the old writer's own journal. Each of that writer's commits looks for it inside its transaction,
so a writer that was stopped at any instruction and wakes up later adds nothing to a rollout that was taken over.
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
from rolltape.tape.journal.file import FENCES, connected, described, is_alive, row_crc
from rolltape.tape.journal.reading import JournalSource
from rolltape.tape.stored import Key, StoredSession

_SELECT_PART = (
    "SELECT pk, head, crc, ends.finish FROM rollouts LEFT JOIN ends ON ends.rollout = rollouts.pk "
    "WHERE id = ? AND try_index = ?"
)


class Fence(NamedTuple):
    """Who took a rollout over, and as which epoch of it."""

    epoch: int
    taker: str


class JournalPart(NamedTuple):
    """What a journal says of one rollout, less its sessions."""

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
    """The rollouts that were taken from the writer of the journal at `path`; none of one that cannot be read."""
    with contextlib.suppress(sqlite3.Error), contextlib.closing(connected(path)) as connection:
        return fences_in(connection)
    return {}


def find_part(path: Path, key: Key) -> JournalPart | None:
    """What the journal at `path` says of a rollout; None: nothing. Raises DamagedTapeError if it cannot be read."""
    with _naming(path), contextlib.closing(connected(path)) as connection:
        for pk, raw, crc, finish in connection.execute(_SELECT_PART, key):
            if row_crc(pk, *key, raw) != crc:
                raise DamagedTapeError(f"row {pk} of rollouts is damaged")
            head = decode_record(raw, RolloutHead, f"rollout {key[0]}")
            return JournalPart(path, pk, head, finish is not None, fences_in(connection).get(key))
    return None


def load_part(part: JournalPart) -> list[StoredSession]:
    """The sessions of a rollout in a journal that nobody adds to. Raises DamagedTapeError if one cannot be read."""
    with _naming(part.path), contextlib.closing(JournalSource(part.path)) as source:
        return _sessions_in(source, part)


def take_part(part: JournalPart, fence: Fence, *, force: bool) -> list[StoredSession]:
    """Set the fence, then load the sessions that its writer had recorded by then.

    The writer must be dead, unless `force` is given; then it must be one that looks for fences.
    """
    alive = is_alive(part.path)
    if alive and not force:
        raise RecordError(
            f"rollout {part.head.id} (try {part.head.try_index}) is being recorded by {described(part.writer)}, which "
            'is alive; wait for it, or end it and resume then. If it hangs, resume="force" takes the rollout from it'
        )
    # Closed after the connection that writes: what closes last may only read, so that it leaves the log (-wal) alone,
    # whose absence a reader would take for a loss.
    with _naming(part.path), contextlib.closing(JournalSource(part.path)) as source:
        _refuse_damage(source)  # to write to a journal whose log is torn would destroy what can still be read
        with contextlib.closing(connected(part.path, "rw")) as writing:
            if alive and not _has_fences(writing):
                raise RecordError(f"{described(part.writer)} runs version 0.1.0, which cannot be refused; end it first")
            _set_fence(writing, part, fence)
        return _sessions_in(source, part)


def _set_fence(connection: sqlite3.Connection, part: JournalPart, fence: Fence) -> None:
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("PRAGMA synchronous = NORMAL")  # it keeps a process out: a loss of power ends that as well
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
    """Say which journal it is that cannot be read."""
    try:
        yield
    except (DamagedTapeError, sqlite3.Error, ValueError, TypeError, OverflowError, struct.error) as error:
        raise DamagedTapeError(f"journal {path}: {error}") from error
