"""Rollouts and events as they are stored, the same whether they come from a journal or a shard.

JSON stays in bytes here, so that fields of a newer version are kept when it is rewritten.
"""

import contextlib
import errno
import os
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from rolltape.errors import TapeError
from rolltape.extras import arrow_errors
from rolltape.records.jsonable import decode_numbers
from rolltape.records.messages import Message, Root
from rolltape.records.rollout import ANNOTATION_KINDS, Event, EventKind, Rollout, RolloutCounts, RolloutHead, Status
from rolltape.records.sample import RolloutSummary
from rolltape.records.turn import Ids, Logprobs, SideArray

Key = tuple[str, int]  # rollout and try
Summarize = Callable[[Rollout], RolloutSummary]

LARGEST_ROW = 2**62


def read_errors() -> tuple[type[Exception], ...]:
    """The errors of reading a source that is damaged, out of reach, or no longer there."""
    of_sources = (TapeError, OSError, sqlite3.Error, msgspec.MsgspecError)
    return arrow_errors(*of_sources, ValueError, LookupError, TypeError, AttributeError)


_MORE_FILES = "raise the limit of open files (`ulimit -n`)"
_SHORT_OF = {
    errno.EMFILE: _MORE_FILES,
    errno.ENFILE: _MORE_FILES,
    errno.ENOMEM: "free memory",
    errno.ENOSPC: "free space where temporary files are kept",
}


def check_shortage(error: BaseException, where: object) -> None:
    """Raise TapeError if a source that is there could not be read because this process is short of something."""
    cause: BaseException | None = error.__cause__ or error
    if getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_CANTOPEN:
        cause = _shortage_of_files()  # SQLite does not say why
    if isinstance(cause, OSError) and cause.errno in _SHORT_OF:
        raise TapeError(f"{where}: cannot be read: {cause.strerror}; {_SHORT_OF[cause.errno]}") from cause


def _shortage_of_files() -> OSError | None:
    """The error that this process gets if it opens as many files as SQLite does for a journal."""
    with contextlib.ExitStack() as opened:
        try:
            for _ in range(3):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            return error
    return None


class Problem(msgspec.Struct, frozen=True):
    """Something on the tape that cannot be read, or contradicts itself."""

    where: str
    what: str
    lost: str  # what cannot be read for that reason; "" if nothing is lost

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + (f"; lost: {self.lost}" if self.lost else "")


class StoredTurn(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A turn as it is coded: how much it keeps of an earlier turn of its session, and what is new."""

    sequence: int
    parent: int | None
    keep_tokens: int
    keep_messages: int
    root: Root
    messages: tuple[Message, ...]
    reply: Message | None
    new_ids: Ids
    sampled_ids: Ids
    logprobs: Logprobs | None
    facts: bytes
    side: Mapping[str, SideArray]


class StoredSession(msgspec.Struct, frozen=True, eq=False):
    head: bytes
    ordinal: int
    turns: Sequence[StoredTurn]

    @property
    def end(self) -> int:
        """One more than the number of its last turn; turns before that one may be lost."""
        return max((turn.sequence + 1 for turn in self.turns), default=0)


class About(msgspec.Struct, frozen=True, gc=False):
    """What an event is about, its kind, and its time."""

    at_ns: int
    kind: str
    rollout: str | None = None
    try_index: int | None = msgspec.field(name="try", default=None)
    turn: str | None = None

    @property
    def key(self) -> Key:
        """The rollout and try; ("", 0) for an event about the run."""
        return (self.rollout or "", self.try_index or 0)


class StoredEvent(msgspec.Struct, frozen=True, gc=False):
    """An event as it is stored. Its data is decoded on demand: for most events only `about` matters."""

    writer: str
    sequence: int
    about: About
    body: bytes

    @property
    def key(self) -> tuple[str, int]:
        return (self.writer, self.sequence)

    @property
    def order(self) -> tuple[int, str, int]:
        """As `Event.order`."""
        return (self.about.at_ns, self.writer, self.sequence)

    @property
    def order_text(self) -> str:
        """The order as a text. These texts sort as their events do."""
        return f"{self.about.at_ns:020d} {self.writer} {self.sequence:012d}"

    @property
    def event(self) -> Event:
        """The decoded event, made anew each time."""
        fields: dict[str, Any] = decode_numbers(self.body) if b'"$float"' in self.body else _decode(self.body)
        return Event(
            writer=self.writer,
            sequence=self.sequence,
            at_ns=fields["at_ns"],
            kind=fields["kind"],
            rollout=fields.get("rollout"),
            try_index=fields.get("try"),
            turn=fields.get("turn"),
            by=fields.get("by"),
            data=fields["data"],
        )


class FoundHead(NamedTuple):
    """A rollout's head as a source lists it, and the number of its row there."""

    row: int
    raw: bytes
    head: RolloutHead
    writer: str


class HeldRollout(NamedTuple):
    """A rollout that a source holds, without its turns."""

    found: FoundHead
    status: Status | None  # as its finish has it; None: it has none
    counts: RolloutCounts

    @property
    def head(self) -> RolloutHead:
        return self.found.head

    @property
    def key(self) -> Key:
        return self.found.head.key

    @property
    def writer(self) -> str:
        return self.found.writer


def decoded_event(writer: str, sequence: int, body: bytes) -> StoredEvent:
    """An event from its stored JSON object."""
    return StoredEvent(writer, sequence, about_of(body), body)


about_of = msgspec.json.Decoder(About).decode
_decode = msgspec.json.Decoder().decode


def decides(about: About) -> bool:
    """Whether the outcome of a rollout may depend on an event: it is not about a turn, a trace or a delivery."""
    return about.turn is None and about.kind not in (EventKind.TRACE, EventKind.DELIVERY)


def is_listed(about: About) -> bool:
    """Whether the index lists an event of a running rollout: it affects outcome, tags, or notes."""
    return decides(about) or about.kind in ANNOTATION_KINDS


def counts_for(stored: StoredEvent, owner: str | None) -> bool:
    """Whether an event counts for a rollout: only its owner finishes it, any writer may append other events."""
    return stored.about.kind != EventKind.FINISH or stored.writer == owner


def rank_part(epoch: int, *, ended: bool, started_ns: int, writer: str) -> tuple[int, bool, int, str]:
    """The rank of a part of a rollout. The first part is its owner's: the part of the highest epoch.

    If two writers recorded the same epoch by mistake, an ended part comes before an open one, then the earlier part.
    """
    return (-epoch, not ended, started_ns, writer)


def join_sessions(parts: Iterable[Sequence[StoredSession]]) -> list[StoredSession]:
    """The sessions of a rollout's parts, given in the order of their epochs: each session once, with all its turns."""
    first, *others = parts
    if not others:
        return list(first)
    heads: dict[int, bytes] = {}
    turns: dict[int, dict[int, StoredTurn]] = {}
    for session in (session for part in (first, *others) for session in part):
        heads[session.ordinal] = session.head
        turns.setdefault(session.ordinal, {}).update({turn.sequence: turn for turn in session.turns})
    return [StoredSession(heads[ordinal], ordinal, list(turns[ordinal].values())) for ordinal in sorted(heads)]


def holds_part(whole: Sequence[StoredSession], part: Sequence[StoredSession]) -> bool:
    """Whether sessions include all turns of a part, with the same ids and facts."""
    turns = {(session.ordinal, turn.sequence): turn for session in whole for turn in session.turns}
    return {session.ordinal for session in part} <= {session.ordinal for session in whole} and all(
        _is_same(turns.get((session.ordinal, turn.sequence)), turn) for session in part for turn in session.turns
    )


def _is_same(one: StoredTurn | None, other: StoredTurn) -> bool:
    return one is not None and _content(one) == _content(other)


def _content(turn: StoredTurn) -> tuple[object, ...]:
    return (turn.parent, turn.keep_tokens, turn.facts, turn.new_ids.tobytes(), turn.sampled_ids.tobytes())
