"""How each kind of entry becomes rows of a journal's tables, inside one transaction."""

import json
import math
import sqlite3
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from rolltape.records.jsonable import encode_numbers, encode_record
from rolltape.records.rollout import EventKind, RolloutHead, SessionHead
from rolltape.records.turn import Turn, TurnFacts
from rolltape.tape.journal.file import row_crc, turn_crc, turn_pk
from rolltape.tape.stored import Key

_COLUMNS = {"contents": 3, "rollouts": 5, "sessions": 5, "turns": 14, "side_arrays": 8, "events": 3, "ends": 2}
_INSERTS = {table: f"INSERT INTO {table} VALUES ({', '.join('?' * count)})" for table, count in _COLUMNS.items()}
_encode_facts = msgspec.json.Encoder().encode


class Batch:
    """The rows of one transaction before they are written. New keys count only once the transaction is committed."""

    def __init__(
        self, known: dict[bytes, int], next_content: int, next_event: int, now_ns: Callable[[int], int]
    ) -> None:
        self.rows: dict[str, list[tuple[Any, ...]]] = {table: [] for table in _INSERTS}
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
                connection.executemany(_INSERTS[table], rows)


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
        root_digest = turn.root.raw_digest
        root_pk = batch.content(root_digest, turn.root.raw)
        message_pks = array("q", [batch.content(message.digest, message.raw) for message in messages]).tobytes()
        reply_pk = None if reply is None else batch.content(reply.digest, reply.raw)
        new_ids, sampled = turn.prompt_tokens.own.tobytes(), turn.sampled_ids.tobytes()
        logprobs = None if turn.logprobs is None else turn.logprobs.tobytes()
        dtype = None if turn.logprobs is None else turn.logprobs.dtype.str[1:]
        coding = (pk, coded.parent, coded.keep_tokens, coded.keep_messages, root_pk, message_pks, reply_pk)
        turn_row = (*coding, len(turn.side), dtype, sampled, new_ids, logprobs, self.facts)
        digests = [message.digest for message in messages]
        crc = turn_crc(turn_row, root_digest, digests, None if reply is None else reply.digest)
        batch.rows["turns"].append((*turn_row, crc))
        for name, side in turn.side.items():
            values = side.values
            shape = json.dumps(values.shape)
            counts = None if side.counts is None else side.counts.tobytes()
            row = (pk, name, side.start, values.dtype.str, shape, values.tobytes(), counts)
            batch.rows["side_arrays"].append((*row, row_crc(*row)))


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
