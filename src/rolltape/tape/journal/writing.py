"""The journal of one writing process, with group commit: one transaction for everything that waits.

A thread waits until its entries are durable. A coroutine gets a future, and all that its event loop submits in one tick
is one transaction.
"""

import asyncio
import contextlib
import enum
import itertools
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from rolltape.errors import ClosedError, TakenOverError, TapeWriteError
from rolltape.tape.journal.entries import Batch, Entry
from rolltape.tape.journal.fences import Fence, fences_in
from rolltape.tape.journal.file import SELECT_FINISH, SELECT_TRIES, Owner, described, make_journal, writer_name
from rolltape.tape.rundir import RunDirectory
from rolltape.tape.stored import Key

T = TypeVar("T")

_KNOWN_CONTENTS = 32_768  # of the contents last used, 6 MB; one that was forgotten is stored again
_UNWRITABLE = (sqlite3.Error, OverflowError, ValueError, TypeError, MemoryError)


class Durability(enum.StrEnum):
    """What a recorded turn survives.

    Example:

        tape = rolltape.open("runs/exp1", durability=rolltape.Durability.POWER)
    """

    PROCESS = "process"  # the death of the process, kill -9 included
    POWER = "power"  # the loss of power as well: every commit waits for the disk


class Ticket:
    """Entries that are written together: all of them are stored, or none.

    It is settled once, by the thread that writes it, which then calls `settled`.
    """

    __slots__ = ("after", "done", "entries", "error", "rollout", "settled")

    def __init__(
        self,
        entries: Sequence[Entry],
        rollout: Key | None = None,
        after: "Ticket | None" = None,
        settled: "Callable[[Ticket], None] | None" = None,
    ) -> None:
        self.entries = entries
        self.rollout = rollout  # only its owner may add these entries; None: no owner is needed
        self.after = after  # refused if that ticket is refused
        self.done = False
        self.error: BaseException | None = None
        self.settled = settled

    @property
    def stored(self) -> bool:
        """Whether its entries are on the disk."""
        return self.done and self.error is None

    @property
    def is_orphan(self) -> bool:
        """Whether the ticket that it builds on was refused."""
        return self.after is not None and self.after.done and self.after.error is not None

    def settle(self, error: BaseException | None = None) -> None:
        """Note how it ended: with this error, or, if None, on the disk."""
        self.error, self.done, self.after = error, True, None
        if self.settled is not None:
            self.settled(self)


class Journal:
    """One SQLite file that only this process writes."""

    def __init__(self, run: RunDirectory, durability: Durability = Durability.PROCESS) -> None:
        self.writer = writer_name()
        self.path = run.journals / f"{self.writer}.sqlite"
        self.pid = os.getpid()
        self._run = run.name
        self.next_rollout = 1
        self.new_session = itertools.count(1).__next__  # the key of another session
        self._waits_for_disk = durability is Durability.POWER
        self._owner = Owner(self.path)
        try:
            self._connection = make_journal(self.path, run, self.writer, waits_for_disk=self._waits_for_disk)
        except (sqlite3.Error, OSError) as error:
            self._owner.release()
            raise TapeWriteError(f"journal {self.path}: cannot be made: {error}") from error
        self._queue: deque[Ticket] = deque()
        self._commit_lock = threading.Lock()
        self._in_doubt: tuple[Batch, Sequence[Ticket]] | None = None  # an interrupt may come while it is committed
        self._known: dict[bytes, int] = {}
        self._next_content = 1
        self.next_event = 0
        self._fences: dict[Key, Fence] = {}
        ((self._data_version,),) = self._connection.execute("PRAGMA data_version").fetchall()
        self._rows = {"rollouts": 0, "sessions": 0, "turns": 0, "ends": 0}
        self._clock_lock = threading.Lock()  # taken last
        self._last_ns = 0
        self._due: asyncio.AbstractEventLoop | None = None  # the loop that will commit what is queued
        self._closed = False

    def now_ns(self, after_ns: int = 0) -> int:
        """A time later than all that this returned before, and than `after_ns`."""
        with self._clock_lock:
            self._last_ns = max(time.time_ns(), self._last_ns + 1, after_ns + 1)
            return self._last_ns

    def append(self, *entries: Entry, rollout: Key | None = None, stored: Callable[[], None] | None = None) -> None:
        """Store entries together, and call `stored`. It returns when they are durable.

        If an interrupt comes when they are on the disk already, `stored` is called too, perhaps twice.
        """
        ticket = Ticket(entries, rollout, settled=stored and (lambda ticket: stored() if ticket.stored else None))
        self.store(ticket)

    def store(self, ticket: Ticket) -> None:
        """Queue a ticket, and return when it is durable. Raise if it could not be written, or is interrupted before."""
        try:
            self.submit(ticket)
            # The thread that gets the lock writes all that is queued. Threads that waited find their entries done.
            with self._commit_lock:
                if not ticket.done:
                    self._commit_queued()
        except BaseException as interrupt:
            self.withdraw(ticket, interrupt)
            raise
        if ticket.error is not None:
            raise ticket.error

    def submit(self, ticket: Ticket) -> None:
        """Queue a ticket without waiting. It is settled when `flush` returns."""
        if self._closed:
            raise ClosedError(f"journal {self.path}: the tape is closed; open it again to record more")
        self._queue.append(ticket)

    def withdraw(self, ticket: Ticket, interrupt: BaseException) -> None:
        """Take back the ticket of an interrupted caller, if it is not written yet."""
        with self._commit_lock:
            if not ticket.done:
                with contextlib.suppress(ValueError):  # it was not queued yet
                    self._queue.remove(ticket)
                ticket.settle(interrupt)

    def flush(self) -> None:
        """Settle everything that was submitted."""
        if self.pid == os.getpid():
            with self._commit_lock:
                self._commit_queued()

    def submit_async(self, ticket: Ticket, value: T) -> asyncio.Future[T]:
        """As `submit`, from a coroutine: the ticket is written with all that its loop submits in this tick.

        The future returns `value` when it is durable, or raises why it could not be written. Cancelling the future
        takes nothing back.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        ticket.settled = partial(_resolve_anywhere, future, value)
        self.submit(ticket)
        if self._due is not loop:
            loop.call_soon(self._commit_tick, loop)
            self._due = loop
        return future

    def _commit_tick(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._waits_for_disk:
            loop.run_in_executor(None, self.flush).add_done_callback(lambda _: self._end_tick(loop))
            return
        # On the loop itself: another thread would wait for the GIL after every statement.
        try:
            self.flush()
        finally:
            self._end_tick(loop)

    def _end_tick(self, loop: asyncio.AbstractEventLoop) -> None:
        """Commit again if entries came while the disk was busy, or were left by an interrupt."""
        self._due = None
        if self._queue:
            self._due = loop
            loop.call_soon(self._commit_tick, loop)

    def _commit_queued(self) -> None:
        waiting = self._queue.copy()
        try:
            if not self._written(waiting):
                for ticket in waiting:  # a ticket that cannot be written must not stop the others
                    self._written([ticket])
        except BaseException:
            self._resolve_doubt()
            raise
        finally:
            while self._queue and self._queue[0].done:
                self._queue.popleft()

    def _written(self, tickets: Sequence[Ticket]) -> bool:
        """Write the tickets that are not settled, in one transaction. A single ticket that fails is refused."""
        tickets = [ticket for ticket in tickets if not self._is_settled(ticket)]
        if not tickets:
            return True
        batch = Batch(self._known, self._next_content, self.next_event, self.now_ns)
        try:
            for ticket in tickets:
                for entry in ticket.entries:
                    entry.write(batch)
            self._connection.execute("BEGIN IMMEDIATE")
            if self._has_new_fences() and any(ticket.rollout in self._fences for ticket in tickets):
                self._roll_back()
                return self._written(tickets)  # tickets of fenced rollouts are refused now, the others are written
            self._in_doubt = batch, tickets
            batch.insert(self._connection)
            self._connection.execute("COMMIT")
        except _UNWRITABLE as error:
            self._roll_back()
            self._in_doubt = None
            if len(tickets) == 1:
                tickets[0].settle(self._refusal(f"{error}; this was not recorded, all before it was", error))
            return False
        self._note_committed(batch, tickets)
        return True

    def _note_committed(self, batch: Batch, tickets: Sequence[Ticket]) -> None:
        """Count what is on the disk now, and settle its tickets. After an interrupt, it begins anew."""
        self._next_content, self.next_event = batch.next_content, batch.next_event
        self._remember(batch.fresh)
        for ticket in tickets:
            ticket.settle()
        rows = {table: count + len(batch.rows[table]) for table, count in self._rows.items()}
        self._rows, self._in_doubt = rows, None

    def _resolve_doubt(self) -> None:
        """After an interrupt: find out whether the last transaction was committed."""
        self._roll_back()
        if self._in_doubt is not None:
            batch, tickets = self._in_doubt
            if batch.is_in(self._connection):
                self._note_committed(batch, tickets)
            self._in_doubt = None

    def _has_new_fences(self) -> bool:
        """Read the fences, inside a transaction, if another connection has written since the last time."""
        ((version,),) = self._connection.execute("PRAGMA data_version").fetchall()
        if version == self._data_version:
            return False
        self._fences, self._data_version = fences_in(self._connection), version
        return True

    def check_open(self, where: str) -> None:
        """Raise ClosedError in a forked child of the process that writes this journal, and after it was closed."""
        if self.pid != os.getpid():
            raise ClosedError(
                f"{where} was opened in process {self.pid}, this is its child {os.getpid()}; open a rollout here"
            )
        if self._closed:
            raise ClosedError(f"{where}: the tape of run {self._run} is closed; open it again to record more")

    def refuse_taken(self, rollout: Key | None) -> None:
        """Raise TakenOverError for a rollout that another writer took over, as far as this one has noticed."""
        if rollout is not None and rollout in self._fences:
            taker = described(self._fences[rollout].taker)
            raise TakenOverError(
                f"rollout {rollout[0]} (try {rollout[1]}) was taken over by {taker}, so this was not recorded; "
                "let that process record it, or start another try with new_try=True"
            )

    def _is_settled(self, ticket: Ticket) -> bool:
        try:
            if not ticket.done:
                self.refuse_taken(ticket.rollout)
        except TakenOverError as error:
            ticket.settle(error)
        # The journal was deleted, and SQLite would go on in it. One that was moved keeps its name in another folder;
        # some file systems count no names at all.
        owner = self._owner
        if not ticket.done and os.fstat(owner.descriptor).st_nlink == 0 and not owner.path.exists():
            ticket.settle(
                self._refusal("it was deleted; this was not recorded, and all before it is lost; start again")
            )
        if not ticket.done and ticket.is_orphan:
            ticket.settle(self._refusal("the turn before it could not be written; this was not recorded either"))
        return ticket.done

    def _refusal(self, what: str, cause: BaseException | None = None) -> TapeWriteError:
        refusal = TapeWriteError(f"journal {self.path}: {what}")
        refusal.__cause__ = cause
        return refusal

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

    def finish_of(self, rollout: str, try_index: int) -> list[tuple[int, bytes, int]]:
        """The row of the event that ended a try, or an empty list if this journal has none."""
        with self._commit_lock:
            return self._connection.execute(SELECT_FINISH, (rollout, try_index)).fetchall()

    def close(self) -> None:
        """Write what is queued, merge the log into the main file, and close the journal. A second call does nothing."""
        if self._closed or self.pid != os.getpid():
            return
        with self._commit_lock:
            self._commit_queued()
            self._closed = True
            # Before the log is removed: without both, a journal looks as if a part of it was lost.
            self._owner.note_closing({**self._rows, "events": self.next_event})
            with contextlib.suppress(sqlite3.Error):  # a full disk: everything is in the log, where readers find it
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                self._connection.close()
            self._owner.release()


class OpenRollout:
    """A rollout in the journal that it is recorded in. Recorders check here whether they may still add to it."""

    def __init__(self, journal: Journal, row: int, key: Key) -> None:
        self.journal = journal
        self.row = row
        self.key = key
        self.ended: str | None = None  # the status that it ended with

    def check(self, where: str) -> Journal:
        """The journal to write to. Raises if the rollout has ended or was taken over, and in a forked child."""
        if self.ended is not None:
            raise ClosedError(f"{where}: rollout {self.key[0]} (try {self.key[1]}) is {self.ended} already")
        self.journal.refuse_taken(self.key)
        self.journal.check_open(f"{where}: rollout {self.key[0]}")
        return self.journal


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _resolve_anywhere(future: asyncio.Future[T], value: T, ticket: Ticket) -> None:
    """Resolve a future, from any thread that settled its ticket."""
    loop = future.get_loop()
    if loop is running_loop():
        _resolve(future, value, ticket.error)
    else:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits
            loop.call_soon_threadsafe(_resolve, future, value, ticket.error)


def _resolve(future: asyncio.Future[T], value: T, error: BaseException | None) -> None:
    if future.done():  # cancelled
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
