"""`JournalSource`: reads a journal whose writer is alive or dead, and whose file is sound or damaged."""

import contextlib
import os
import sqlite3
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from rolltape.errors import DamagedTapeError
from rolltape.records.jsonable import decode_numbers, decode_record
from rolltape.records.messages import Message
from rolltape.records.rollout import EventKind, RolloutCounts, RolloutHead
from rolltape.tape.journal.entries import (
    MAX_TURNS,
    SEQUENCE_BITS,
    TURN_COLUMNS,
    Contents,
    TurnReader,
    event_crc,
    row_crc,
    turn_pk,
)
from rolltape.tape.journal.file import closing_counts, connected, has_log, is_alive, try_to_open
from rolltape.tape.repair.salvage import (
    Hole,
    Opened,
    is_log_older,
    opened_as_copy,
    opened_with_torn_log,
    rows_around,
    unseen_frames,
)
from rolltape.tape.rundir import is_too_new
from rolltape.tape.stored import (
    LARGEST_ROW,
    FoundHead,
    Key,
    Problem,
    StoredEvent,
    StoredSession,
    StoredTurn,
    decoded_event,
)

SessionRow = tuple[int, int, bytes]  # its key, its ordinal, its head

_PAUSES_S = [0.001 * 2**step for step in range(8)]  # a quarter of a second in all

_OLDER_LOG = "its log (-wal) is older than the file: both were copied while it was written; copy them again"
_SESSION_COLUMNS = "rollout, ordinal, head, crc"
_OUT_OF_ORDER = 256  # events: threads of one writer may write theirs in another order than they made them


def opened_to_read(path: Path, alive: bool) -> Opened:
    """Open a journal. A damaged one is opened in the way that can still read it. The file itself is never changed."""
    is_left = has_log(path) and not alive
    # A log that was copied before its journal would hide newer rows of the journal, so it is left out.
    is_older = is_left and is_log_older(path)
    if is_left and not is_older and not os.access(path.parent, os.W_OK):
        return opened_as_copy(path)
    # If no process writes it and it has no log, read it as it is, without making files beside it.
    mode = "ro" if alive or (is_left and not is_older) else "ro&immutable=1"
    connection, _ = try_to_open(path, mode)
    if connection is None:
        return opened_as_copy(path)
    if is_older:
        return Opened(connection, _OLDER_LOG, None)
    if is_left and not Path(f"{path}-shm").is_file():  # it cannot be made here, and says what SQLite sees of the log
        connection.close()
        return opened_as_copy(path)
    unseen = _lasting_unseen_frames(path) if is_left else 0
    return opened_with_torn_log(path, connection, unseen) if unseen else Opened(connection, None, None)


def _lasting_unseen_frames(path: Path) -> int:
    """How many frames of a log SQLite does not count. It soon counts those of a fence that is being written."""
    for pause_s in _PAUSES_S:
        if not unseen_frames(path):
            return 0
        time.sleep(pause_s)
    return unseen_frames(path)


def readable_rows(
    connection: sqlite3.Connection, columns: str, table: str, key: str, low: int, high: int, most: int
) -> Iterator[tuple[Any, ...] | Hole]:
    """Rows with `low <= key <= high` in order, the key first; a Hole for each range that cannot be read.

    Around damage the search goes no further than the key `most`.
    """
    select = f"SELECT {key}, {columns} FROM {table} WHERE {key} BETWEEN ? AND ? ORDER BY {key}"
    reached = low
    try:
        for row in connection.execute(select, (low, high)):
            # A damaged tree can lead SQLite to rows outside the range, which belong to others.
            if reached <= row[0] <= high:
                yield row
                reached = row[0] + 1
        return
    except sqlite3.DatabaseError as error:
        reason = str(error)
    yield from rows_around(connection, select, reached, max(min(high, most), reached), reason)


class JournalSource:
    """One journal: what it held when this was made, and what was written since."""

    sealed = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.where = f"journal {path.name}"
        self.writer = path.stem
        self.alive = is_alive(path)
        self._problems: dict[Problem, None] = {}
        self._watcher: sqlite3.Connection | None = None
        self._watched = 0
        # The counts are read before the rows, so a writer that closes in the meantime cannot look like a loss.
        self._counts = None if self.alive else closing_counts(path)
        self._connection, damage, self._copy = opened_to_read(path, self.alive)
        self._damaged = damage is not None
        if damage is not None:
            self._problem(damage, "possibly what was written last")
        self._check_schema()
        self._check_log()

    @property
    def name(self) -> str:
        """Its name in the index."""
        return f"journal/{self.writer}"

    def probe(self) -> bool:
        """Check again whether its writer is alive. Call it before `pin`: then all that a dead writer wrote is seen."""
        self.alive = self.alive and is_alive(self.path)
        return self.alive

    def pin(self) -> int:
        """Read the journal as it is now until `unpin`. Return the number of its last event, or -1."""
        self.unpin()
        self._watched = self._watch() if self.alive else 0
        self._connection.execute("BEGIN")
        return self.last_event()

    def has_news(self) -> bool:
        """Whether it was written to since it was pinned, or its writer has died."""
        if self._watcher is None:
            return False
        return self._watched != self._watch() or (self.alive and not is_alive(self.path))

    def _watch(self) -> int:
        # A second connection: the pinned one does not see later writes.
        if self._watcher is None:
            self._watcher = connected(self.path)
        ((version,),) = self._watcher.execute("PRAGMA data_version").fetchall()
        return int(version)

    def unpin(self) -> None:
        """End the read transaction, so that new rows are seen again."""
        if self._connection.in_transaction:
            with contextlib.suppress(sqlite3.DatabaseError):  # it was sealed and removed in the meantime
                self._connection.execute("COMMIT")

    def last_event(self) -> int:
        """The number of the last event that is there now, or -1."""
        return self._last("events", "sequence", -1)

    def last_rollout(self) -> int:
        """The number of the last rollout that is there now, or 0."""
        return self._last("rollouts", "pk", 0)

    def _last(self, table: str, key: str, default: int) -> int:
        try:
            ((last,),) = self._connection.execute(f"SELECT coalesce(max({key}), {default}) FROM {table}").fetchall()
            return int(last)
        except sqlite3.DatabaseError:  # what can be read around the damage
            return max((row[0] for row in self._rows("crc", table, key, table)), default=default)

    def _check_schema(self) -> None:
        with contextlib.suppress(sqlite3.DatabaseError, ValueError, TypeError):
            (schema,) = self._connection.execute("SELECT value FROM about WHERE key = 'schema'").fetchone()
            if is_too_new(schema):
                self.close()
                raise DamagedTapeError(f"{self.path}: written with schema {schema}; update rolltape to read it")

    def _check_log(self) -> None:
        if not self.alive and self._counts is None and not has_log(self.path):
            self._problem("it seems not to have been closed, and its log (-wal) is missing", "what was only in the log")

    def _turns(self, session: int, name: str, contents: Contents) -> Iterator[StoredTurn]:
        reader = TurnReader(self._connection, contents, self._problem)
        rows = list(self._rows(TURN_COLUMNS, "turns", "pk", f"turns of session {name}", *_range(session)))
        for made in reader.turns(rows):
            if isinstance(made, StoredTurn):
                yield made
            else:
                turn = f"turn {name}.{made[0] & (MAX_TURNS - 1)}"
                self._problem(f"{turn} is damaged: {made[1]}", turn)

    def _rows(
        self, columns: str, table: str, key: str, what: str, low: int = 0, high: int = LARGEST_ROW
    ) -> Iterator[tuple[Any, ...]]:
        # Keys are dense, and a row takes more than eight bytes. This limits the search among damaged pages.
        most = low + (self.path.stat().st_size if self.path.exists() else 0) // 8
        for row in readable_rows(self._connection, columns, table, key, low, high, most):
            if isinstance(row, Hole):
                first, last = (row.low - low, row.high - low) if table == "turns" else (row.low, row.high)
                rows = f"{first} to {last}" if row.high < min(high, most) else f"from {first} on"
                self._problem(f"{what} {rows} cannot be read: {row.error}", f"{what} {rows}")
            else:
                yield row

    def keys(self, low: int) -> Iterator[tuple[int, Key]]:
        """The rollouts from a row on, by their keys alone."""
        for pk, id_, try_index in self._rows("id, try_index", "rollouts", "pk", "rollouts", low):
            yield pk, (id_, try_index)

    def heads(self, low: int = 0, high: int = LARGEST_ROW) -> Iterator[FoundHead]:
        for pk, id_, try_index, raw, crc in self._rows(
            "id, try_index, head, crc", "rollouts", "pk", "rollouts", low, high
        ):
            if row_crc(pk, id_, try_index, raw) != crc:
                self._problem(f"row {pk} of rollouts is damaged", f"rollout {id_} (try {try_index})")
                continue
            with self._noting(f"rollout {id_} (try {try_index})"):
                yield FoundHead(pk, raw, decode_record(raw, RolloutHead, f"rollout {id_}"), self.writer)

    def numbered_events(self, low: int = 0, high: int = LARGEST_ROW) -> Iterator[tuple[int, StoredEvent]]:
        expected = low
        for sequence, body, crc in self._rows("body, crc", "events", "sequence", "events", low, high):
            if sequence != expected:
                self._problem(f"events {expected} to {sequence - 1} are missing", "their contents")
            expected = sequence + 1
            try:
                if event_crc(sequence, body) != crc:
                    raise DamagedTapeError(f"event {sequence} is damaged")
                yield sequence, decoded_event(self.writer, sequence, body)
            except (DamagedTapeError, msgspec.MsgspecError, TypeError) as error:
                self._problem(str(error), "its contents")

    def events_about(self, key: Key, low: int) -> list[StoredEvent]:
        """The events about a rollout from a number on. The others are not decoded, and damage is not looked for."""
        rows = self._connection.execute(
            "SELECT sequence, body FROM events WHERE sequence >= ? AND instr(body, ?)", (low, key[0].encode())
        )
        found = (decoded_event(self.writer, *row) for row in rows)
        return [one for one in found if one.about.key == key]

    def first_event_since(self, at_ns: int) -> int:
        """An event number before which no event is as late as that time, found by binary search."""
        low, high = 0, self.last_event() + 1
        while low < high:
            middle = (low + high) // 2
            found = next(self.numbered_events(middle, middle), None)
            low, high = (middle + 1, high) if found is not None and found[1].about.at_ns < at_ns else (low, middle)
        return max(low - _OUT_OF_ORDER, 0)

    def sessions_of(self, rollout: int) -> list[SessionRow]:
        """The keys, ordinals and heads of a rollout's sessions."""
        if self._has_session_index:
            query = f"SELECT pk, {_SESSION_COLUMNS} FROM sessions WHERE rollout = ? ORDER BY pk"
            try:
                return self._intact_sessions(self._connection.execute(query, (rollout,)).fetchall()).get(rollout, [])
            except sqlite3.DatabaseError:
                self._has_session_index = False
        return self._sessions.get(rollout, [])

    @cached_property
    def _sessions(self) -> dict[int, list[SessionRow]]:
        """The sessions of all rollouts, read around damage."""
        return self._intact_sessions(self._rows(_SESSION_COLUMNS, "sessions", "pk", "sessions"))

    def _intact_sessions(self, rows: Iterable[tuple[Any, ...]]) -> dict[int, list[SessionRow]]:
        """Sessions by their rollout's row. Those with a damaged row are left out."""
        found: dict[int, list[SessionRow]] = {}
        for pk, rollout, ordinal, raw, crc in rows:
            if row_crc(pk, rollout, ordinal, raw) == crc:
                found.setdefault(rollout, []).append((pk, ordinal, raw))
            else:
                self._problem(f"row {pk} of sessions is damaged", f"session {pk} of this journal, with its turns")
        return found

    @cached_property
    def _has_session_index(self) -> bool:
        if self._damaged:
            return False
        with contextlib.suppress(sqlite3.DatabaseError):
            return bool(self._connection.execute("PRAGMA index_list(sessions)").fetchall())
        return False

    def earlier_parts(self, rollout: int) -> RolloutCounts | None:
        """How much earlier writers had recorded of the rollout in a row, or None if it began here."""
        found = next(iter(self.heads(rollout, rollout)), None)
        return None if found is None else found.head.earlier

    def sampled_since(self, session: int, sequence: int) -> Iterator[tuple[int, int, bytes]]:
        """The turns of a session from a sequence number on: number, sampled tokens, facts."""
        low, high = turn_pk(session, sequence), turn_pk(session, MAX_TURNS - 1)
        for pk, size, facts in self._rows("length(sampled), facts", "turns", "pk", "turns", low, high):
            yield pk & (MAX_TURNS - 1), size // 4 if isinstance(size, int) else 0, facts

    def stored(self, row: int, head: RolloutHead) -> list[StoredSession]:
        name, contents = f"{head.id}.{head.try_index}", dict[int, Any]()
        return [
            StoredSession(raw, ordinal, list(self._turns(pk, f"{name}.{ordinal}", contents)))
            for pk, ordinal, raw in self.sessions_of(row)
        ]

    def messages(self, row: int) -> Iterator[Message]:
        """The messages of the rollout in a row, in the order of its turns. No tokens are read."""
        reader = TurnReader(self._connection, {}, self._problem)
        for session, _, _ in self.sessions_of(row):
            for _, keys, reply in self._rows("messages, reply", "turns", "pk", "turns", *_range(session)):
                yield from reader.messages(keys if reply is None else keys + array("q", [reply]).tobytes())

    def check_whole(self) -> None:
        """Note rows without a readable owner, and counts that do not agree, as they are at one moment."""
        self._connection.execute("BEGIN")
        try:
            self._check_rows()
        finally:
            self.unpin()

    def _check_rows(self) -> None:
        heads = list(self.heads())
        keys, rows = {found.head.key for found in heads}, {found.row for found in heads}
        by_rollout = self._intact_sessions(self._rows(_SESSION_COLUMNS, "sessions", "pk", "sessions"))
        for rollout, sessions in by_rollout.items():
            if rollout not in rows:
                names = ", ".join(_session_name(raw) for _, _, raw in sessions)
                self._problem(f"the rollout of session {names} is missing", f"session {names}")
        known = {pk for sessions in by_rollout.values() for pk, _, _ in sessions}
        counts: dict[int, int] = {}
        for (pk,) in self._rows_of_keys():
            counts[pk >> SEQUENCE_BITS] = counts.get(pk >> SEQUENCE_BITS, 0) + 1
        for session in counts.keys() - known:
            self._problem(f"session {session} is missing", f"{counts[session]} turns of session {session}")
        finishes = {one.about.key for _, one in self.numbered_events() if one.about.kind == EventKind.FINISH}
        self._check_count("rollouts", len(rows))
        self._check_count("sessions", len(known))
        self._check_count("turns", sum(counts.values()))
        self._check_count("events", self.last_event() + 1)
        self._check_ends(len(finishes & keys))

    def _check_ends(self, finishes: int) -> None:
        """Compare the list of ends, by which a finish is found, with the finishes themselves."""
        try:
            ((listed,),) = self._connection.execute("SELECT count(*) FROM ends").fetchall()
        except sqlite3.DatabaseError:
            return  # its writer's version had no such list
        if listed != finishes:
            self._problem(f"{listed} rollouts are listed as ended, {finishes} have a finish", "")

    def _rows_of_keys(self) -> Iterator[tuple[int]]:
        with contextlib.suppress(sqlite3.DatabaseError):
            yield from self._connection.execute("SELECT pk FROM turns ORDER BY pk")

    def _check_count(self, table: str, found: int) -> None:
        if self._counts is not None and self._counts.get(table, 0) > found:
            what = f"{self._counts[table]} {table} were there when it was closed, {found} are found"
            self._problem(what, f"{self._counts[table] - found} {table}")

    def problems(self) -> Sequence[Problem]:
        return list(self._problems)

    def _problem(self, what: str, lost: str) -> None:
        self._problems[Problem(self.where, what, lost)] = None

    @contextlib.contextmanager
    def _noting(self, lost: str) -> Iterator[None]:
        try:
            yield
        except (DamagedTapeError, msgspec.MsgspecError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._problem(str(error), lost)

    def close(self) -> None:
        self._connection.close()
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
        if self._copy is not None:
            self._copy.cleanup()


def _range(session: int) -> tuple[int, int]:
    return turn_pk(session, 0), turn_pk(session, MAX_TURNS - 1)


def _session_name(raw: bytes) -> str:
    try:
        return str(decode_numbers(raw)["id"])
    except (ValueError, KeyError, TypeError):
        return "?"
