"""The journal of one writing process: what is appended is durable when `append` returns. Group commit, one transaction
for everything that waits."""

import contextlib
import enum
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from rolltape.errors import ClosedError, TapeWriteError
from rolltape.tape.entries import Batch, Entry
from rolltape.tape.owner import Owner, writer_name
from rolltape.tape.rundir import SCHEMA, RunDirectory, sync_directory
from rolltape.tape.schema import SELECT_TRIES, TABLES

_PAGES_BEFORE_CHECKPOINT = 4096  # 16 MiB: a checkpoint syncs, so fewer and larger ones cost less
_KNOWN_CONTENTS = 131_072  # of the contents last used: one that comes back later is stored again


_UNWRITABLE = (sqlite3.Error, OverflowError, ValueError, TypeError)


class Durability(enum.StrEnum):
    """What a recorded turn survives."""

    PROCESS = "process"  # the death of the process, kill -9 included
    POWER = "power"  # the loss of power as well: every commit waits for the disk


class Ticket:
    """Entries on their way to the disk together: all of them are kept, or none."""

    __slots__ = ("done", "entries", "error")

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries
        self.done = False
        self.error: BaseException | None = None

    @property
    def stored(self) -> bool:
        """Whether its entries are on the disk."""
        return self.done and self.error is None


class Journal:
    """One SQLite file that only this process writes."""

    def __init__(self, run: RunDirectory, durability: Durability = Durability.PROCESS) -> None:
        self.writer = writer_name()
        self.path = run.journals / f"{self.writer}.sqlite"
        self.pid = os.getpid()
        self.next_rollout = 1
        self.next_session = 1
        self._owner = Owner(self.path)
        try:
            self._connection = _made(self.path, run, self.writer, durability)
        except (sqlite3.Error, OSError) as error:
            self._owner.forget()
            raise TapeWriteError(f"journal {self.path}: cannot be made: {error}") from error
        self._queue: deque[Ticket] = deque()
        self._commit_lock = threading.Lock()
        self._known: dict[bytes, int] = {}
        self._next_content = 1
        self._next_event = 0
        self._rows = {"rollouts": 0, "sessions": 0, "turns": 0}
        self._closed = False

    def append(self, *entries: Entry) -> None:
        """Store entries together; returns when they are durable."""
        self.wait(self.submit(*entries))

    def submit(self, *entries: Entry) -> Ticket:
        """Queue entries without waiting. They are durable once `wait` on the ticket, or `flush`, returns."""
        if self._closed:
            raise ClosedError(f"journal {self.path}: the tape is closed; open it again to record more")
        ticket = Ticket(entries)
        self._queue.append(ticket)
        return ticket

    def wait(self, ticket: Ticket) -> None:
        """Return when the ticket is durable; raise if it could not be written."""
        if not ticket.done:
            try:
                # Whoever gets the lock writes all that is queued; those who waited for it find their entries done.
                with self._commit_lock:
                    if not ticket.done:
                        self._commit_queued(ticket)
            except BaseException:
                self._withdraw(ticket)
                raise
        if ticket.error is not None:
            raise TapeWriteError(
                f"journal {self.path}: {ticket.error}; this was not recorded, all before it was"
            ) from ticket.error

    def _withdraw(self, ticket: Ticket) -> None:
        """Take back what an interrupted caller will not hear about, if nobody has written it yet."""
        with self._commit_lock, contextlib.suppress(ValueError):
            self._queue.remove(ticket)

    def flush(self) -> None:
        """Make everything that was submitted durable."""
        with self._commit_lock:
            self._commit_queued(None)

    def _commit_queued(self, own: Ticket | None) -> None:
        waiting: list[Ticket] = []
        while self._queue:
            waiting.append(self._queue.popleft())
        try:
            if not self._written(waiting) and len(waiting) > 1:
                for ticket in waiting:  # what cannot be written must not take the others with it
                    self._written([ticket])
        except BaseException as error:
            self._roll_back()
            unwritten = [ticket for ticket in waiting if not ticket.done and ticket is not own]
            self._queue.extendleft(reversed(unwritten))
            if own is not None and not own.done:
                own.done, own.error = True, error
            raise

    def _written(self, tickets: Sequence[Ticket]) -> bool:
        batch = Batch(self._connection, self._known, self._next_content, self._next_event)
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for ticket in tickets:
                for entry in ticket.entries:
                    entry.write(batch)
            batch.write_turns()
            self._connection.execute("COMMIT")
        except _UNWRITABLE as error:
            self._roll_back()
            for ticket in tickets:
                ticket.error, ticket.done = error, len(tickets) == 1
            return False
        self._next_content, self._next_event = batch.next_content, batch.next_event
        for table, count in batch.added.items():
            self._rows[table] += count
        self._remember(batch.fresh)
        for ticket in tickets:
            ticket.error, ticket.done = None, True
        return True

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")

    def _remember(self, fresh: dict[bytes, int]) -> None:
        self._known.update(fresh)
        if len(self._known) > _KNOWN_CONTENTS:
            self._known = dict(list(self._known.items())[_KNOWN_CONTENTS // 2 :])

    def tries(self, rollout: str) -> list[int]:
        """The tries of a rollout that this journal holds."""
        with self._commit_lock:
            return [row[0] for row in self._connection.execute(SELECT_TRIES, (rollout,))]

    def close(self) -> None:
        """Write what is queued, fold the log into the main file, and let go of the journal. Twice is fine."""
        if self._closed or self.pid != os.getpid():
            return
        with self._commit_lock:
            self._commit_queued(None)
            self._closed = True
            counts: dict[str, int] | None = {**self._rows, "events": self._next_event}
            try:
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                self._connection.close()
            except sqlite3.Error:
                counts = None  # a full disk: everything is in the log, where readers find it
            self._owner.release(counts)


def _made(path: Path, run: RunDirectory, writer: str, durability: Durability) -> sqlite3.Connection:
    """A fresh journal. It gets its name when its tables are there, so no reader meets one without."""
    fresh = path.with_suffix(".making")
    with contextlib.closing(sqlite3.connect(fresh, isolation_level=None)) as making:
        making.executescript("PRAGMA synchronous = OFF; BEGIN;" + TABLES)
        about = {"schema": SCHEMA, "run": run.name, "writer": writer}
        making.executemany("INSERT INTO about VALUES (?, ?)", about.items())
        making.execute("COMMIT")
        making.execute("PRAGMA journal_mode = WAL")
    fresh.rename(path)
    if durability is Durability.POWER:
        # Before SQLite opens it: closing a file drops the locks that this process has on it.
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
        sync_directory(path.parent)
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=64)
    connection.execute("PRAGMA busy_timeout = 10000")
    connection.execute(f"PRAGMA synchronous = {'FULL' if durability is Durability.POWER else 'NORMAL'}")
    connection.execute(f"PRAGMA wal_autocheckpoint = {_PAGES_BEFORE_CHECKPOINT}")
    connection.execute("PRAGMA cache_size = -16384")
    return connection
