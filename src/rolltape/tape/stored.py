"""A rollout as it lies on a tape, the same whether it comes from a journal or a shard, and what a place that holds some
can be asked. JSON stays in bytes here, so that fields of a newer version survive whatever rewrites it."""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from rolltape.errors import TapeError
from rolltape.extras import arrow_errors
from rolltape.records.events import ANNOTATION_KINDS
from rolltape.records.jsonable import decode_numbers
from rolltape.records.messages import Message, Root
from rolltape.records.rollout import Event, EventKind, RolloutHead, Status
from rolltape.records.turn import Ids, Logprobs, SideArray

Key = tuple[str, int]  # rollout and try

LARGEST_ROW = 2**62


def read_errors() -> tuple[type[Exception], ...]:
    """What reading a source may raise that is damaged, out of reach, or no longer there."""
    of_sources = (TapeError, OSError, sqlite3.Error, msgspec.MsgspecError)
    return arrow_errors(*of_sources, ValueError, LookupError, TypeError, AttributeError)


class Problem(msgspec.Struct, frozen=True):
    """Something on the tape that cannot be read, or contradicts itself."""

    where: str
    what: str
    lost: str  # what cannot be had for that reason; "" if nothing is lost

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + (f"; lost: {self.lost}" if self.lost else "")


class StoredTurn(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A turn as it is coded: so much of an earlier turn of its session, and what is new."""

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


class About(msgspec.Struct, frozen=True, gc=False):
    """What an event is about, of which kind, and when it was said."""

    at_ns: int
    kind: str
    rollout: str | None = None
    try_index: int | None = msgspec.field(name="try", default=None)
    turn: str | None = None

    @property
    def key(self) -> Key:
        """The rollout and try; none has that of an event about the run."""
        return (self.rollout or "", self.try_index or 0)


class StoredEvent(msgspec.Struct, frozen=True, gc=False):
    """An event as it is stored. What it says is read when asked for: of most it matters only what they are about."""

    writer: str
    sequence: int
    about: About
    body: bytes

    @property
    def key(self) -> tuple[str, int]:
        return (self.writer, self.sequence)

    @property
    def order(self) -> tuple[int, str, int]:
        """As that of the Event."""
        return (self.about.at_ns, self.writer, self.sequence)

    @property
    def order_text(self) -> str:
        """The order as a text: such texts sort as their events do."""
        return f"{self.about.at_ns:020d} {self.writer} {self.sequence:012d}"

    @property
    def event(self) -> Event:
        """All of it, made anew each time."""
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


class RolloutCounts(NamedTuple):
    """How much there is of a rollout: turns of each session, sampled tokens, weight versions as they appear."""

    turns: tuple[int, ...]
    sampled_tokens: int
    versions: tuple[str, ...]


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


class Source(Protocol):
    """A journal or a shard. What is damaged is left out and noted as a problem."""

    where: str
    alive: bool  # a process still writes it
    sealed: bool

    def heads(self, low: int = 0, high: int = LARGEST_ROW) -> Iterator[FoundHead]:
        """The rollouts in the rows `[low, high]`."""
        ...

    def numbered_events(self, low: int = 0, high: int = LARGEST_ROW) -> Iterator[tuple[int, StoredEvent]]:
        """The events `[low, high]` with their numbers, about its own rollouts and others."""
        ...

    def stored(self, row: int, head: RolloutHead) -> list[StoredSession]:
        """The sessions of the rollout in a row, with their turns."""
        ...

    def problems(self) -> Sequence[Problem]:
        """What could not be read so far."""
        ...

    def close(self) -> None: ...


def decoded_event(writer: str, sequence: int, body: bytes) -> StoredEvent:
    """An event from its stored JSON object."""
    return StoredEvent(writer, sequence, about_of(body), body)


about_of = msgspec.json.Decoder(About).decode
_decode = msgspec.json.Decoder().decode


def decides(about: About) -> bool:
    """Whether the outcome of a rollout may follow from an event: it is not of a turn, and not of a trace."""
    return about.turn is None and about.kind not in (EventKind.TRACE, EventKind.DELIVERY)


def is_listed(about: About) -> bool:
    """Whether the index lists an event of a rollout that still runs: it bears on outcome, tags, or notes."""
    return decides(about) or about.kind in ANNOTATION_KINDS


def counts_for(stored: StoredEvent, owner: str | None) -> bool:
    """Whether an event counts for a rollout: only its own writer finishes it, anybody may say the rest."""
    return stored.about.kind != EventKind.FINISH or stored.writer == owner


def rank_part(epoch: int, *, ended: bool, started_ns: int, writer: str) -> tuple[int, bool, int, str]:
    """Of all parts of a rollout the first by this rank is its owner's: that of the highest epoch.

    If two writers recorded the same epoch by mistake: one that ended before one that did not, then the earlier one.
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
    """Whether sessions include all turns of a part, to the letter."""
    turns = {(session.ordinal, turn.sequence): turn for session in whole for turn in session.turns}
    return {session.ordinal for session in part} <= {session.ordinal for session in whole} and all(
        _is_same(turns.get((session.ordinal, turn.sequence)), turn) for session in part for turn in session.turns
    )


def _is_same(one: StoredTurn | None, other: StoredTurn) -> bool:
    return one is not None and _content(one) == _content(other)


def _content(turn: StoredTurn) -> tuple[object, ...]:
    return (turn.parent, turn.keep_tokens, turn.facts, turn.new_ids.tobytes(), turn.sampled_ids.tobytes())
