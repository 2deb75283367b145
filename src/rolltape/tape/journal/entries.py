"""The rows of a journal's tables: how each kind of entry becomes rows, and rows become turns; their keys and checksums.

A turn's key is its session's key and its sequence number in one integer, so a session's turns lie together without a
further index. Rows refer to messages, tools and template options by key. The checksum of a turn covers their digests,
so a damaged reference is noticed.
"""

import contextlib
import json
import math
import sqlite3
import struct
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from rolltape.errors import DamagedTapeError, NotJsonError
from rolltape.records.jsonable import encode_numbers, encode_record
from rolltape.records.messages import Message, Root
from rolltape.records.rollout import EventKind, RolloutHead, SessionHead
from rolltape.records.turn import SideArray, Turn, TurnFacts
from rolltape.tape.stored import Key, StoredTurn

Contents = dict[int, Message | Root]  # by key: those made so far

SEQUENCE_BITS = 24
MAX_TURNS = 1 << SEQUENCE_BITS

TURN_COLUMNS = (
    "parent, keep_tokens, keep_messages, root, messages, reply, sides, dtype, sampled, new_ids, logprobs, facts, crc"
)
_TABLES = ("contents", "rollouts", "sessions", "turns", "side_arrays", "events", "ends")
_NUMBERS = struct.Struct("<8q")
_encode_facts = msgspec.json.Encoder().encode


def turn_pk(session: int, sequence: int) -> int:
    """The key of a session's turn."""
    return session << SEQUENCE_BITS | sequence


def turn_crc(row: Sequence[Any], root: bytes, messages: Sequence[bytes], reply: bytes | None) -> int:
    """The checksum of a turn's row, with the digests of its root, its messages and its reply in place of their keys."""
    pk, parent, keep_tokens, keep_messages, _, _, _, sides, dtype, sampled, new_ids, logprobs, facts = row
    kept = (pk, -1 if parent is None else parent, keep_tokens, keep_messages)
    numbers = _NUMBERS.pack(*kept, len(messages), sides, len(sampled), len(new_ids))
    kind = b"-" if dtype is None else dtype.encode()
    digests = (root, *messages, b"-" if reply is None else reply)
    return zlib.crc32(b"".join((numbers, *digests, kind, sampled, new_ids, logprobs or b"", facts)))


def event_crc(sequence: int, body: bytes) -> int:
    """Equal to `row_crc` of both fields, at half the cost: a run has many events."""
    number = b"%d" % sequence
    return zlib.crc32(body, zlib.crc32(b"%d:%b%d:" % (len(number), number, len(body))))


def row_crc(*fields: int | str | bytes | None) -> int:
    """The checksum of any other row, over its fields in order, each with its length."""
    crc = 0
    for field in fields:
        data = field if isinstance(field, bytes) else repr(field).encode()
        crc = zlib.crc32(data, zlib.crc32(b"%d:" % len(data), crc))
    return crc


class Batch:
    """The rows of one transaction before they are written. New keys count only once the transaction is committed."""

    def __init__(
        self, known: dict[bytes, int], next_content: int, next_event: int, now_ns: Callable[[int], int]
    ) -> None:
        self.rows: dict[str, list[tuple[Any, ...]]] = {table: [] for table in _TABLES}
        self.fresh: dict[bytes, int] = {}
        self.next_content = next_content
        self.next_event = next_event
        self.now_ns = now_ns
        self._known = known

    def content(self, digest: bytes, raw: bytes) -> int:
        """The key of a message or root. It is stored now unless the writer remembers that the journal has it."""
        pk = self._known.pop(digest, None)
        if pk is not None:
            self._known[digest] = pk  # moved to the end: the longest unused key is forgotten first
            return pk
        pk = self.fresh.get(digest)
        if pk is None:
            pk = self.fresh[digest] = self.next_content
            self.next_content += 1
            self.rows["contents"].append((pk, digest, raw))
        return pk

    def insert(self, connection: sqlite3.Connection) -> None:
        """Write the rows, table by table."""
        for table, rows in self.rows.items():
            if rows:
                values = ", ".join("?" * len(rows[0]))
                connection.executemany(f"INSERT INTO {table} VALUES ({values})", rows)

    def is_in(self, connection: sqlite3.Connection) -> bool:
        """Whether the rows are in the database: all of them or none. The key of the first row is a new one."""
        table, rows = next((one for one in self.rows.items() if one[1]), ("", []))
        return not rows or bool(connection.execute(f"SELECT 1 FROM {table} WHERE rowid = ?", rows[0][:1]).fetchall())


class Entry(Protocol):
    """Something that can be appended."""

    def write(self, batch: Batch) -> None: ...


class StartedRollout:
    """A rollout's identity. It is encoded here, so that one that cannot be encoded does not reach the queue."""

    def __init__(self, pk: int, head: RolloutHead) -> None:
        self._row = (pk, head.id, head.try_index, encode_record(head, f"rollout {head.id}"))

    def write(self, batch: Batch) -> None:
        batch.rows["rollouts"].append((*self._row, row_crc(*self._row)))


class StartedSession:
    """A session of a rollout."""

    def __init__(self, pk: int, rollout: int, head: SessionHead) -> None:
        self._row = (pk, rollout, head.ordinal, encode_record(head, f"session {head.id}"))

    def write(self, batch: Batch) -> None:
        batch.rows["sessions"].append((*self._row, row_crc(*self._row)))


class CodedTurn(msgspec.Struct, frozen=True):
    """A turn and how it is coded: how many tokens and messages it keeps of an earlier turn of its session."""

    turn: Turn
    parent: int | None  # sequence number of that turn; None: it stands alone
    keep_tokens: int
    keep_messages: int
    given_whole: bool


class RecordedTurn(msgspec.Struct, frozen=True):
    """A turn as it is coded, and its facts as JSON."""

    session: int
    coded: CodedTurn
    facts: bytes

    def write(self, batch: Batch) -> None:
        coded = self.coded
        turn = coded.turn
        pk = turn_pk(self.session, turn.sequence)
        messages, reply = turn.prompt.own, turn.reply
        root_pk = batch.content(turn.root.raw_digest, turn.root.raw)
        message_pks = array("q", [batch.content(message.digest, message.raw) for message in messages]).tobytes()
        reply_pk = None if reply is None else batch.content(reply.digest, reply.raw)
        new_ids, sampled = turn.prompt_tokens.own.tobytes(), turn.sampled_ids.tobytes()
        logprobs = None if turn.logprobs is None else turn.logprobs.tobytes()
        dtype = None if turn.logprobs is None else turn.logprobs.dtype.str[1:]
        kept = (pk, coded.parent, coded.keep_tokens, coded.keep_messages)
        references = (root_pk, message_pks, reply_pk)
        row = (*kept, *references, len(turn.side), dtype, sampled, new_ids, logprobs, self.facts)
        digests = [message.digest for message in messages]
        crc = turn_crc(row, turn.root.raw_digest, digests, None if reply is None else reply.digest)
        batch.rows["turns"].append((*row, crc))
        for name, side in turn.side.items():
            values = side.values
            counts = None if side.counts is None else side.counts.tobytes()
            array_row = (pk, name, side.start, values.dtype.str, json.dumps(values.shape), values.tobytes(), counts)
            batch.rows["side_arrays"].append((*array_row, row_crc(*array_row)))


class NewEvent(NamedTuple):
    """An event to append about a rollout (all its tries, or one) or a turn. EventKind describes `data`."""

    kind: EventKind
    rollout: str
    data: dict[str, Any]
    by: str | None = None
    try_index: int | None = None
    turn: str | None = None


class LoggedEvent(msgspec.Struct, frozen=True):
    """The JSON object of an event, without its time.

    Its time and its sequence number are set when it is written. So the events of a journal have no gaps, and their
    times follow the order in which they are written.
    """

    fields: bytes
    after_ns: int = 0  # its time must be later than this

    def body(self, at_ns: int) -> bytes:
        """The whole object, as it is stored."""
        return b'{"at_ns":%d,%b' % (at_ns, self.fields[1:])

    def write(self, batch: Batch) -> None:
        row = (batch.next_event, self.body(batch.now_ns(self.after_ns)))
        batch.rows["events"].append((*row, row_crc(*row)))
        batch.next_event += 1


class EndedRollout(msgspec.Struct, frozen=True):
    """The end of a rollout: its finish, and the score that comes with it."""

    rollout: int
    finish: LoggedEvent
    score: LoggedEvent | None

    def write(self, batch: Batch) -> None:
        batch.rows["ends"].append((self.rollout, batch.next_event))
        self.finish.write(batch)
        if self.score is not None:
            self.score.write(batch)


def facts_json(facts: TurnFacts, where: str) -> bytes:
    """As `encode_record`, but fast if all numbers are finite. The intake has checked the facts."""
    if facts.unknown or not (_all_finite(facts.sampling) and not facts.sampling_asked and not facts.extra):
        return encode_record(facts, where)
    if not all(math.isfinite(number or 0.0) for number in (facts.reward, facts.started_at, facts.ended_at)):
        return encode_record(facts, where)
    return _encode_facts(facts)


def _all_finite(settings: dict[str, Any]) -> bool:
    """Whether settings are flat, with numbers that JSON can hold."""
    return all(
        math.isfinite(item) if type(item) is float else type(item) in (int, bool, str) or item is None
        for item in settings.values()
    )


def encode_event(
    kind: str,
    rollout: Key | None,
    data: dict[str, Any],
    *,
    turn: str | None = None,
    by: str | None = None,
    after_ns: int = 0,
) -> LoggedEvent:
    """An event about a rollout, or (None) the run. Its time will be later than `after_ns` and all of its journal."""
    name, try_index = rollout or (None, None)
    fields = {"kind": str(kind), "rollout": name, "try": try_index, "turn": turn, "by": by, "data": data}
    return LoggedEvent(encode_numbers(fields, f"{kind} of rollout {name}" if name else str(kind)), after_ns)


class TurnReader:
    """Makes turns from rows. `note` is called for each damaged side array, with what is lost."""

    def __init__(self, connection: sqlite3.Connection, contents: Contents, note: Callable[[str, str], None]) -> None:
        self._connection = connection
        self._contents = contents
        self._note = note
        self._read_ahead: dict[int, tuple[bytes, bytes]] = {}

    def turns(self, rows: Sequence[tuple[Any, ...]]) -> Iterator[StoredTurn | tuple[int, Exception]]:
        """The turn of each row, or its key and why the turn cannot be made. Reads all their contents at once."""
        wanted = {key for row in rows for key in (row[4], row[6], *_keys(row[5]))}
        self._read_contents(sorted(key for key in wanted if isinstance(key, int) and key not in self._contents))
        for row in rows:
            try:
                yield self.turn(row)
            except (DamagedTapeError, ValueError, TypeError, AttributeError, OverflowError, struct.error) as error:
                yield row[0], error

    def turn(self, row: tuple[Any, ...]) -> StoredTurn:
        """The turn of a row, whose first field is its key. Raises DamagedTapeError, or numpy's errors for odd bytes."""
        pk, parent, keep_tokens, keep_messages, root_pk, message_pks, reply_pk, sides, dtype = row[:9]
        sampled, new_ids, logprobs, facts, crc = row[9:]
        root = self._root(root_pk)
        messages = [self._message(one) for one in array("q", message_pks)]
        reply = None if reply_pk is None else self._message(reply_pk)
        digests = [one.digest for one in messages]
        if turn_crc(row[:-1], root.raw_digest, digests, None if reply is None else reply.digest) != crc:
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

    def messages(self, keys: bytes) -> Iterator[Message]:
        """The messages with these keys that were not read yet, as far as they can be read."""
        for pk in array("q", keys):
            if pk not in self._contents:
                with contextlib.suppress(DamagedTapeError):
                    yield self._message(pk)

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
                    self._note(f"side array {name!r} of {turn} is damaged", f"side array {name!r} of {turn}")
                    expected -= 1
                    continue
                values = np.frombuffer(data, np.dtype(dtype)).reshape(json.loads(shape))
                found[name] = SideArray(start, values, None if counts is None else np.frombuffer(counts, np.int32))
        except sqlite3.DatabaseError as error:
            self._note(f"side arrays of {turn} cannot be read: {error}", f"side arrays of {turn}")
            return found
        if len(found) < expected:
            self._note(f"{turn} had {expected} side arrays, {len(found)} are found", f"side arrays of {turn}")
        return found

    def _root(self, pk: int) -> Root:
        known = self._contents.get(pk)
        if not isinstance(known, Root):
            known = self._contents[pk] = Root(self._content(pk)[0])
        return known

    def _message(self, pk: int) -> Message:
        known = self._contents.get(pk)
        if isinstance(known, Message):
            return known
        raw, digest = self._content(pk)
        try:
            message = Message.stored(raw)
        except (ValueError, AttributeError, NotJsonError) as error:
            raise DamagedTapeError(f"message {pk} is damaged: {error}") from None
        if message.digest != digest:
            raise DamagedTapeError(f"message {pk} is damaged")
        self._contents[pk] = message
        return message

    def _read_contents(self, keys: list[int]) -> None:
        select = "SELECT pk, raw, digest FROM contents WHERE pk IN (SELECT value FROM json_each(?))"
        with contextlib.suppress(sqlite3.DatabaseError):  # rows that cannot be read are found one by one later
            for pk, *row in self._connection.execute(select, (json.dumps(keys),)):
                self._read_ahead[pk] = (row[0], row[1])

    def _content(self, pk: int) -> tuple[bytes, bytes]:
        try:
            row = self._read_ahead.pop(pk, None)
            if row is None:
                row = self._connection.execute("SELECT raw, digest FROM contents WHERE pk = ?", (pk,)).fetchone()
        except sqlite3.DatabaseError as error:
            raise DamagedTapeError(f"content {pk} cannot be read: {error}") from None
        if row is None:
            raise DamagedTapeError(f"content {pk} is missing")
        if blake2b(row[0], digest_size=16).digest() != row[1]:
            raise DamagedTapeError(f"content {pk} is damaged")
        return row[0], row[1]


def _keys(packed: object) -> Iterable[int]:
    """The keys of a row's messages; none if the row is damaged, which is noticed when its turn is made."""
    return array("q", packed) if isinstance(packed, bytes) and len(packed) % 8 == 0 else ()
