"""The rows of a journal's tables: their keys, their checksums, and how each kind of entry becomes rows.

A turn's key is its session's key and its sequence number in one integer, so a session's turns lie together without a
further index. Rows refer to messages, tools and template options by key. The checksum of a turn covers their digests,
so a damaged reference is noticed.
"""

import json
import math
import sqlite3
import struct
import zlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from rolltape.records.jsonable import encode_numbers, encode_record
from rolltape.records.rollout import EventKind, RolloutHead, SessionHead
from rolltape.records.turn import Turn, TurnFacts
from rolltape.tape.stored import Key

SEQUENCE_BITS = 24
MAX_TURNS = 1 << SEQUENCE_BITS

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
