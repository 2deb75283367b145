"""A journal as a reader sees it, its writer alive or dead, the file sound or damaged."""

import contextlib
import json
import sqlite3
import struct
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rolltape.errors import DamagedTapeError, NotJsonError
from rolltape.records.jsonable import decode_numbers
from rolltape.records.messages import Message, Root
from rolltape.records.openfields import decode_record
from rolltape.records.rollout import EventKind, RolloutHead
from rolltape.records.turn import SideArray
from rolltape.tape.owner import closing_counts, is_alive
from rolltape.tape.rundir import SCHEMA
from rolltape.tape.salvage import Hole, opened_to_read, readable_rows
from rolltape.tape.schema import MAX_TURNS, SEQUENCE_BITS, row_crc, turn_crc, turn_pk
from rolltape.tape.stored import HeldRollout, Key, Problem, StoredEvent, StoredSession, StoredTurn, decoded_event
from rolltape.tape.torn import log_of

_LARGEST = 2**62
_TURN = (
    "parent, keep_tokens, keep_messages, root, messages, reply, sides, dtype, sampled, new_ids, logprobs, facts, crc"
)


class JournalSource:
    """One journal, as it was when this was made and whatever came since."""

    sealed = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.where = f"journal {path.name}"
        self.writer = path.stem
        self.alive = is_alive(path)
        self._problems: dict[Problem, None] = {}
        # The counts are read before the rows, so a writer that closes meanwhile cannot look like a loss.
        self._counts = None if self.alive else closing_counts(path)
        self._connection, damage, self._copy = opened_to_read(path, self.alive)
        if damage is not None:
            self._problem(damage, "possibly what was written last")
        self._check_schema()

    def _check_schema(self) -> None:
        with contextlib.suppress(sqlite3.DatabaseError, ValueError, TypeError):
            (schema,) = self._connection.execute("SELECT value FROM about WHERE key = 'schema'").fetchone()
            if int(schema.partition(".")[0]) > int(SCHEMA.partition(".")[0]):
                self.close()
                raise DamagedTapeError(f"{self.path}: written with schema {schema}; update rolltape to read it")

    def _check_log(self) -> None:
        if self._counts is None and not log_of(self.path).exists():
            self._problem(
                "it was not closed, as far as one can tell, and its log (-wal) is missing", "what was only in the log"
            )

    @cached_property
    def _rollouts(self) -> dict[int, tuple[RolloutHead, bytes]]:
        found: dict[int, tuple[RolloutHead, bytes]] = {}
        for pk, id_, try_index, raw, crc in self._rows("id, try_index, head, crc", "rollouts", "pk", "rollouts"):
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
        for pk, rollout, ordinal, raw, crc in self._rows("rollout, ordinal, head, crc", "sessions", "pk", "sessions"):
            if row_crc(pk, rollout, ordinal, raw) != crc:
                self._problem(f"row {pk} of sessions is damaged", f"session {pk} of this journal, with its turns")
                continue
            found.setdefault(rollout, []).append((pk, ordinal, raw))
            count += 1
        self._check_count("sessions", count)
        return found

    def listing(self) -> Sequence[HeldRollout]:
        finishes = {
            (stored.event.rollout, stored.event.try_index): stored.event.data
            for stored in self.events()
            if stored.event.kind == EventKind.FINISH
        }
        held = []
        for pk, (head, raw) in list(self._rollouts.items()):
            data = finishes.get(head.key)
            counts = data if data is not None and "sampled_tokens" in data else self._counted(pk)
            held.append(
                HeldRollout(
                    head=head,
                    raw_head=raw,
                    writer=self.writer,
                    turns=tuple(counts["turns"]),
                    sampled_tokens=counts["sampled_tokens"],
                    versions=tuple(counts.get("versions", ())),
                )
            )
        return held

    def _counted(self, rollout: int) -> dict[str, Any]:
        """The counts of a rollout that has no finish to say them."""
        turns: list[int] = []
        sampled = 0
        versions: dict[str, None] = {}
        for pk, _, _ in self._sessions.get(rollout, []):
            rows = list(self._rows("length(sampled), facts", "turns", "pk", "turns", *_range(pk)))
            turns.append(max((row[0] & (MAX_TURNS - 1) for row in rows), default=-1) + 1)
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
        expected = 0
        for sequence, body, crc in self._rows("body, crc", "events", "sequence", "events"):
            if sequence != expected:
                self._problem(f"events {expected} to {sequence - 1} are missing", "what they said")
            expected = sequence + 1
            if row_crc(sequence, body) != crc:
                self._problem(f"event {sequence} is damaged", "what it said")
                continue
            with self._noting("what it said"):
                found[sequence] = decoded_event(self.writer, sequence, body)
        self._check_count("events", expected)
        return found

    def load(self, key: Key) -> Sequence[StoredSession]:
        pk = self._pk_of[key]
        contents: dict[int, Message | Root | None] = {}
        return [
            StoredSession(raw, ordinal, list(self._turns(session, f"{key[0]}.{key[1]}.{ordinal}", contents)))
            for session, ordinal, raw in self._sessions.get(pk, [])
        ]

    def _turns(self, session: int, name: str, contents: dict[int, Message | Root | None]) -> Iterator[StoredTurn]:
        for row in self._rows(_TURN, "turns", "pk", f"turns of session {name}", *_range(session)):
            try:
                yield self._turn(row, contents)
            except (DamagedTapeError, ValueError, TypeError, AttributeError, OverflowError, struct.error) as error:
                turn = f"turn {name}.{row[0] & (MAX_TURNS - 1)}"
                self._problem(f"{turn} is damaged: {error}", turn)

    def _turn(self, row: tuple[Any, ...], contents: dict[int, Message | Root | None]) -> StoredTurn:
        pk, parent, keep_tokens, keep_messages, root_pk, message_pks, reply_pk, sides, dtype = row[:9]
        sampled, new_ids, logprobs, facts, crc = row[9:]
        root_raw, root_digest = self._content(root_pk)
        known = contents.get(root_pk)
        root = known if isinstance(known, Root) else Root(root_raw)
        contents[root_pk] = root
        messages = [self._message(one, contents) for one in array("q", message_pks)]
        reply = None if reply_pk is None else self._message(reply_pk, contents)
        numbers = (
            pk,
            -1 if parent is None else parent,
            keep_tokens,
            keep_messages,
            len(messages),
            sides,
            len(sampled),
            len(new_ids),
        )
        digests = (root_digest, *(one.digest for one in messages), b"-" if reply is None else reply.digest)
        kind = b"-" if dtype is None else dtype.encode()
        if turn_crc(numbers, (*digests, kind, sampled, new_ids, logprobs or b"", facts)) != crc:
            raise DamagedTapeError("its checksum does not agree")
        return StoredTurn(
            sequence=pk & (MAX_TURNS - 1),
            parent=parent,
            keep_tokens=keep_tokens,
            keep_messages=keep_messages,
            root=root,
            messages=tuple(messages),
            reply=reply,
            new_ids=np.frombuffer(new_ids, np.int32),
            sampled_ids=np.frombuffer(sampled, np.int32),
            logprobs=None if logprobs is None else np.frombuffer(logprobs, np.dtype(dtype)),
            facts=facts,
            side=self._side_arrays(pk, sides) if sides else {},
        )

    def _side_arrays(self, pk: int, expected: int) -> dict[str, SideArray]:
        found: dict[str, SideArray] = {}
        turn = f"turn {pk & (MAX_TURNS - 1)} of session {pk >> SEQUENCE_BITS} of this journal"
        try:
            for name, *row in self._connection.execute(
                "SELECT name, start, dtype, shape, data, counts, crc FROM side_arrays WHERE turn = ? ORDER BY rowid",
                (pk,),
            ):
                start, dtype, shape, data, counts, crc = row
                if row_crc(pk, name, start, dtype, shape, data, counts) != crc:
                    self._problem(f"side array {name!r} of {turn} is damaged", f"side array {name!r} of {turn}")
                    expected -= 1
                    continue
                values = np.frombuffer(data, np.dtype(dtype)).reshape(json.loads(shape))
                found[name] = SideArray(start, values, None if counts is None else np.frombuffer(counts, np.int32))
        except sqlite3.DatabaseError as error:
            self._problem(f"side arrays of {turn} cannot be read: {error}", f"side arrays of {turn}")
            return found
        if len(found) < expected:
            self._problem(f"{turn} had {expected} side arrays, {len(found)} are found", f"side arrays of {turn}")
        return found

    def _message(self, pk: int, contents: dict[int, Message | Root | None]) -> Message:
        known = contents.get(pk)
        if isinstance(known, Message):
            return known
        raw, digest = self._content(pk)
        try:
            message = Message.stored(raw)
        except (ValueError, AttributeError, NotJsonError) as error:
            raise DamagedTapeError(f"message {pk} is damaged: {error}") from None
        if message.digest != digest:
            raise DamagedTapeError(f"message {pk} is damaged")
        contents[pk] = message
        return message

    def _content(self, pk: int) -> tuple[bytes, bytes]:
        try:
            row = self._connection.execute("SELECT raw, digest FROM contents WHERE pk = ?", (pk,)).fetchone()
        except sqlite3.DatabaseError as error:
            raise DamagedTapeError(f"content {pk} cannot be read: {error}") from None
        if row is None:
            raise DamagedTapeError(f"content {pk} is missing")
        if blake2b(row[0], digest_size=16).digest() != row[1]:
            raise DamagedTapeError(f"content {pk} is damaged")
        return row[0], row[1]

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

    def check_whole(self) -> None:
        """Note a missing log, rows that belong to nothing that is readable, and closing counts that do not agree."""
        if not self.alive:
            self._check_log()
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
        if self._copy is not None:
            self._copy.cleanup()


def _range(session: int) -> tuple[int, int]:
    return turn_pk(session, 0), turn_pk(session, MAX_TURNS - 1)


def _session_name(raw: bytes) -> str:
    try:
        return str(decode_numbers(raw)["id"])
    except (ValueError, KeyError, TypeError):
        return "?"
