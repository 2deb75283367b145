"""A journal as a reader sees it, its writer alive or dead, the file sound or damaged."""

import contextlib
import sqlite3
from array import array
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from rolltape.errors import DamagedTapeError
from rolltape.records.jsonable import decode_numbers, decode_record
from rolltape.records.messages import Message
from rolltape.records.rollout import EarlierParts, RolloutHead, Status
from rolltape.tape.journal.file import (
    MAX_TURNS,
    SEQUENCE_BITS,
    closing_counts,
    event_crc,
    has_log,
    is_alive,
    row_crc,
    turn_pk,
)
from rolltape.tape.journal.rows import TURN_COLUMNS, Contents, TurnReader, opened_to_read, readable_rows
from rolltape.tape.repair.salvage import Hole
from rolltape.tape.rundir import SCHEMA
from rolltape.tape.stored import (
    FoundHead,
    HeldRollout,
    Key,
    Problem,
    StoredEvent,
    StoredSession,
    StoredTurn,
    decoded_event,
    ends_in,
)

T = TypeVar("T")

_LARGEST = 2**62
_NO_EARLIER = EarlierParts((), 0, ())
_OUT_OF_ORDER = 256  # events: threads of one writer may write theirs in another order than they made them


class Since(NamedTuple):
    """From which rows on a journal is read: the keys of the first rollout, session and event that matter."""

    rollout: int = 0
    session: int = 0
    event: int = 0


BEGINNING = Since()


class JournalSource:
    """One journal, as it was when this was made and whatever came since."""

    sealed = False

    def __init__(self, path: Path, since: Since = BEGINNING) -> None:
        self.path = path
        self._since = since
        self.where = f"journal {path.name}"
        self.writer = path.stem
        self.alive = is_alive(path)
        self._problems: dict[Problem, None] = {}
        self._watcher: sqlite3.Connection | None = None
        self._watched = 0
        # The counts are read before the rows, so a writer that closes meanwhile cannot look like a loss.
        self._counts = None if self.alive else closing_counts(path)
        self._connection, damage, self._copy = opened_to_read(path, self.alive)
        self._damaged = damage is not None
        if damage is not None:
            self._problem(damage, "possibly what was written last")
        self._check_schema()
        self._check_log()

    @property
    def name(self) -> str:
        """What the index calls it."""
        return f"journal/{self.writer}"

    def probe(self) -> bool:
        """Look again whether its writer lives; before `pin`, so that what a dead one has written is all there."""
        self.alive = self.alive and is_alive(self.path)
        return self.alive

    def pin(self) -> int:
        """See the journal as it is now until `unpin`; the number of its last event, -1 if there is none."""
        self.unpin()
        self._watched = self._watch() if self.alive else 0
        self._connection.execute("BEGIN")
        return self.last_event()

    def has_news(self) -> bool:
        """Whether somebody has written to it since it was pinned, or its writer has died."""
        if self._watcher is None:
            return False
        return self._watched != self._watch() or (self.alive and not is_alive(self.path))

    def _watch(self) -> int:
        # Another connection: the pinned one sees nothing of it.
        if self._watcher is None:
            self._watcher = sqlite3.connect(f"{self.path.as_uri()}?mode=ro", uri=True, check_same_thread=False)
        ((version,),) = self._watcher.execute("PRAGMA data_version").fetchall()
        return int(version)

    def unpin(self) -> None:
        """See what is new again."""
        if self._connection.in_transaction:
            with contextlib.suppress(sqlite3.DatabaseError):  # it was sealed and removed meanwhile
                self._connection.execute("COMMIT")

    def last_event(self) -> int:
        """The number of the last event that is there now; -1: there is none."""
        return self._last("events", "sequence", -1)

    def last_rollout(self) -> int:
        """The number of the last rollout that is there now; 0: there is none."""
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
            if int(schema.partition(".")[0]) > int(SCHEMA.partition(".")[0]):
                self.close()
                raise DamagedTapeError(f"{self.path}: written with schema {schema}; update rolltape to read it")

    def _check_log(self) -> None:
        if not self.alive and self._counts is None and not has_log(self.path):
            self._problem(
                "it was not closed, as far as one can tell, and its log (-wal) is missing", "what was only in the log"
            )

    @cached_property
    def _rollouts(self) -> dict[int, tuple[RolloutHead, bytes]]:
        found: dict[int, tuple[RolloutHead, bytes]] = {}
        for pk, id_, try_index, raw, crc in self._rows(
            "id, try_index, head, crc", "rollouts", "pk", "rollouts", self._since.rollout
        ):
            if row_crc(pk, id_, try_index, raw) != crc:
                self._problem(f"row {pk} of rollouts is damaged", f"rollout {id_} (try {try_index})")
                continue
            with self._noting(f"rollout {id_} (try {try_index})"):
                found[pk] = (decode_record(raw, RolloutHead, f"rollout {id_}"), raw)
        self._check_count("rollouts", len(found))
        return found

    @cached_property
    def _pk_of(self) -> dict[Key, int]:
        return {head.key: pk for pk, (head, _) in self._rollouts.items()}

    @cached_property
    def _sessions(self) -> dict[int, list[tuple[int, int, bytes]]]:
        """Per rollout's key: its sessions' keys, ordinals and heads."""
        found: dict[int, list[tuple[int, int, bytes]]] = {}
        count = 0
        for pk, rollout, ordinal, raw, crc in self._rows(
            "rollout, ordinal, head, crc", "sessions", "pk", "sessions", self._since.session
        ):
            if row_crc(pk, rollout, ordinal, raw) != crc:
                self._problem(f"row {pk} of sessions is damaged", f"session {pk} of this journal, with its turns")
                continue
            found.setdefault(rollout, []).append((pk, ordinal, raw))
            count += 1
        self._check_count("sessions", count)
        return found

    def listing(self) -> Sequence[HeldRollout]:
        finishes, rewarded = ends_in(self._events.values())
        held = []
        for pk, (head, raw) in list(self._rollouts.items()):
            data = finishes.get(head.key)
            counts = data if data is not None and "sampled_tokens" in data else self._counted(pk)
            held.append(
                HeldRollout(
                    head=head,
                    raw_head=raw,
                    writer=self.writer,
                    status=None if data is None else Status(data["status"]),
                    rewarded=head.key in rewarded,
                    turns=tuple(counts["turns"]),
                    sampled_tokens=counts["sampled_tokens"],
                    versions=tuple(counts.get("versions", ())),
                )
            )
        return held

    def _counted(self, rollout: int) -> dict[str, Any]:
        """The counts of a rollout that has no finish to say them."""
        earlier = self.earlier_parts(rollout)
        turns: list[int] = []
        sampled = earlier.sampled_tokens
        versions = dict.fromkeys(earlier.versions)
        for pk, ordinal, _ in self._sessions.get(rollout, []):
            rows = list(self._rows("length(sampled), facts", "turns", "pk", "turns", *_range(pk)))
            before = earlier.turns[ordinal] if ordinal < len(earlier.turns) else 0
            turns.append(max((row[0] & (MAX_TURNS - 1) for row in rows), default=before - 1) + 1)
            sampled += sum(row[1] // 4 for row in rows if isinstance(row[1], int))
            for _, _, facts in rows:
                with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                    for segment in decode_numbers(facts)["segments"]:
                        fields = ("first_version", "last_version")
                        versions.update({segment[field]: None for field in fields if segment.get(field) is not None})
        return {"turns": turns, "sampled_tokens": sampled, "versions": list(versions)}

    def events(self) -> Sequence[StoredEvent]:
        return list(self._events.values())

    @cached_property
    def _events(self) -> dict[int, StoredEvent]:
        found: dict[int, StoredEvent] = {}
        expected = self._since.event
        for sequence, body, crc in self._rows("body, crc", "events", "sequence", "events", expected):
            if sequence != expected:
                self._problem(f"events {expected} to {sequence - 1} are missing", "what they said")
            expected = sequence + 1
            try:
                if event_crc(sequence, body) != crc:
                    raise DamagedTapeError(f"event {sequence} is damaged")
                found[sequence] = decoded_event(self.writer, sequence, body)
            except (DamagedTapeError, msgspec.MsgspecError, TypeError) as error:
                self._problem(str(error), "what it said")
        self._check_count("events", expected)
        return found

    def read_sessions(self) -> None:
        """Take note of the sessions that there are now."""
        _ = self._sessions

    def since(self, waiting: Collection[Key], event: int) -> Since:
        """From where to read it the next time, if of the rollouts read now only these still matter.

        For a journal that is being written the sessions must have been read before the rollouts.
        """
        rollouts = {self._pk_of[key] for key in waiting}
        sessions = {pk: [session for session, _, _ in self._sessions.get(pk, [])] for pk in rollouts}
        # A session has its key before its row is written: as long as a rollout has none, an earlier one may come.
        first_session = self._since.session
        if all(sessions.values()):
            last = max((pk for found in self._sessions.values() for pk, _, _ in found), default=first_session - 1)
            first_session = min((pk for found in sessions.values() for pk in found), default=last + 1)
        last_rollout = max(self._rollouts, default=self._since.rollout - 1)
        return Since(min(rollouts, default=last_rollout + 1), first_session, event)

    def load(self, key: Key) -> Sequence[StoredSession]:
        pk = self._pk_of[key]
        contents: Contents = {}
        return [
            StoredSession(raw, ordinal, list(self._turns(session, f"{key[0]}.{key[1]}.{ordinal}", contents)))
            for session, ordinal, raw in self._sessions.get(pk, [])
        ]

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
        self, columns: str, table: str, key: str, what: str, low: int = 0, high: int = _LARGEST
    ) -> Iterator[tuple[Any, ...]]:
        # Keys are dense, and a row takes more than eight bytes: so far a search among damaged pages needs to go.
        most = low + (self.path.stat().st_size if self.path.exists() else 0) // 8
        for row in readable_rows(self._connection, columns, table, key, low, high, most):
            if isinstance(row, Hole):
                first, last = (row.low - low, row.high - low) if table == "turns" else (row.low, row.high)
                stretch = f"{first} to {last}" if row.high < high else f"from {first} on"
                self._problem(f"{what} {stretch} cannot be read: {row.error}", f"{what} {stretch}")
            else:
                yield row

    def keys(self, low: int) -> Iterator[tuple[int, Key]]:
        """The rollouts from a row on, by their keys alone."""
        for pk, id_, try_index in self._rows("id, try_index", "rollouts", "pk", "rollouts", low):
            yield pk, (id_, try_index)

    def heads(self, low: int, high: int = _LARGEST) -> Iterator[FoundHead]:
        """The rollouts `[low, high]`."""
        for pk, id_, try_index, raw, crc in self._rows(
            "id, try_index, head, crc", "rollouts", "pk", "rollouts", low, high
        ):
            if row_crc(pk, id_, try_index, raw) != crc:
                self._problem(f"row {pk} of rollouts is damaged", f"rollout {id_} (try {try_index})")
                continue
            with self._noting(f"rollout {id_} (try {try_index})"):
                yield FoundHead(pk, raw, decode_record(raw, RolloutHead, f"rollout {id_}"), self.writer)

    def numbered_events(self, low: int, high: int = _LARGEST) -> Iterator[tuple[int, StoredEvent]]:
        """The events `[low, high]` with their numbers."""
        for sequence, body, crc in self._rows("body, crc", "events", "sequence", "events", low, high):
            try:
                if event_crc(sequence, body) != crc:
                    raise DamagedTapeError(f"event {sequence} is damaged")
                yield sequence, decoded_event(self.writer, sequence, body)
            except (DamagedTapeError, msgspec.MsgspecError, TypeError) as error:
                self._problem(str(error), "what it said")

    def first_event_since(self, at_ns: int) -> int:
        """An event number before which none is as late as that time, found by halving."""
        low, high = 0, self.last_event() + 1
        while low < high:
            middle = (low + high) // 2
            found = next(self.numbered_events(middle, middle), None)
            low, high = (middle + 1, high) if found is not None and found[1].about.at_ns < at_ns else (low, middle)
        return max(low - _OUT_OF_ORDER, 0)

    def sessions_of(self, rollout: int) -> list[tuple[int, int, bytes]]:
        """The keys, ordinals and heads of a rollout's sessions."""
        if not self._has_session_index:
            return self._sessions.get(rollout, [])
        try:
            rows = self._connection.execute(
                "SELECT pk, ordinal, head, crc FROM sessions WHERE rollout = ? ORDER BY pk", (rollout,)
            ).fetchall()
        except sqlite3.DatabaseError:
            self._has_session_index = False
            return self._sessions.get(rollout, [])
        found = []
        for pk, ordinal, raw, crc in rows:
            if row_crc(pk, rollout, ordinal, raw) == crc:
                found.append((pk, ordinal, raw))
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

    def earlier_parts(self, rollout: int) -> EarlierParts:
        """What other writers had recorded of the rollout in a row before it came here."""
        found = next(iter(self.heads(rollout, rollout)), None)
        return _NO_EARLIER if found is None or found.head.earlier is None else found.head.earlier

    def sampled_since(self, session: int, sequence: int) -> Iterator[tuple[int, int, bytes]]:
        """The turns of a session from a sequence number on: number, sampled tokens, facts."""
        low, high = turn_pk(session, sequence), turn_pk(session, MAX_TURNS - 1)
        for pk, size, facts in self._rows("length(sampled), facts", "turns", "pk", "turns", low, high):
            yield pk & (MAX_TURNS - 1), size // 4 if isinstance(size, int) else 0, facts

    def stored(self, row: int, head: RolloutHead) -> list[StoredSession]:
        """The sessions of the rollout in a row, with their turns."""
        name, contents = f"{head.id}.{head.try_index}", dict[int, Any]()
        return [
            StoredSession(raw, ordinal, list(self._turns(pk, f"{name}.{ordinal}", contents)))
            for pk, ordinal, raw in self.sessions_of(row)
        ]

    def messages(self, row: int) -> Iterator[Message]:
        """The messages of the rollout in a row as its turns came to hold them; no tokens are read."""
        reader = TurnReader(self._connection, {}, self._problem)
        for session, _, _ in self.sessions_of(row):
            low, high = _range(session)
            turns = self._connection.execute(
                "SELECT messages, reply FROM turns WHERE pk BETWEEN ? AND ? ORDER BY pk", (low, high)
            ).fetchall()
            for keys, reply in turns:
                yield from reader.messages(keys if reply is None else keys + array("q", [reply]).tobytes())

    def check_whole(self) -> None:
        """Note rows that belong to nothing that is readable, and closing counts that do not agree."""
        for rollout, sessions in self._sessions.items():
            if rollout not in self._rollouts:
                names = ", ".join(_session_name(raw) for _, _, raw in sessions)
                self._problem(f"the rollout of session {names} is missing", f"session {names}")
        known = {pk for sessions in self._sessions.values() for pk, _, _ in sessions}
        counts: dict[int, int] = {}
        for (pk,) in self._rows_of_keys():
            counts[pk >> SEQUENCE_BITS] = counts.get(pk >> SEQUENCE_BITS, 0) + 1
        for session in counts.keys() - known:
            self._problem(f"session {session} is missing", f"{counts[session]} turns of session {session}")
        self._check_count("turns", sum(counts.values()))
        self._check_ends()

    def _check_ends(self) -> None:
        """Compare the list of ends, by which a finish is found, with the finishes themselves."""
        try:
            ((listed,),) = self._connection.execute("SELECT count(*) FROM ends").fetchall()
        except sqlite3.DatabaseError:
            return  # its writer was of a version that listed none
        finishes = sum(key in self._pk_of for key in ends_in(self._events.values())[0])
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
