"""A rollout as it lies on a tape, the same whether it comes from a journal or a shard, and what a place that holds some
can be asked. JSON stays in bytes here, so that fields of a newer version survive whatever rewrites it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy.typing as npt

from rolltape.records.jsonable import decode_numbers
from rolltape.records.messages import Message, Root
from rolltape.records.rollout import Event, EventKind, RolloutHead, Status
from rolltape.records.turn import Ids, Logprobs, SideArray
from rolltape.tape.index.standing import Wanted, gathered, packed, unpacked

Key = tuple[str, int]  # rollout and try


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


class HeldRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout as a source lists it, without its turns."""

    head: RolloutHead
    raw_head: bytes
    writer: str
    status: Status | None  # as its finish has it; None: it has none
    rewarded: bool  # by this source
    turns: tuple[int, ...]  # per session
    sampled_tokens: int
    versions: tuple[str, ...]  # weight versions, as they first appear

    @property
    def key(self) -> Key:
        return self.head.key


def standings_of(held: Iterable[HeldRollout], unended: Status, wanted: Wanted) -> npt.NDArray[Any]:
    """How listed rollouts stand; `unended` is the status of those that no finish tells of."""
    stored = b"".join(packed(one.head, one.status or unended, rewarded=one.rewarded) for one in held)
    return gathered([unpacked(stored)], wanted)


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


class Source(Protocol):
    """A journal or a shard."""

    where: str
    alive: bool  # a process still writes it
    sealed: bool

    def listing(self) -> Sequence[HeldRollout]:
        """Its rollouts, without loading their turns."""
        ...

    def events(self) -> Sequence[StoredEvent]:
        """All events that it holds, about its own rollouts and others."""
        ...

    def load(self, key: Key) -> Sequence[StoredSession]:
        """One rollout's sessions."""
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


def ends_in(events: Iterable[StoredEvent]) -> tuple[dict[Key, dict[str, Any]], set[Key]]:
    """What the finishes among events say, and which rollouts the others reward."""
    finishes: dict[Key, dict[str, Any]] = {}
    rewarded: set[Key] = set()
    for stored in events:
        if stored.about.kind == EventKind.FINISH:
            finishes[stored.about.key] = stored.event.data
        elif stored.about.kind == EventKind.SCORE and stored.about.turn is None:
            rewarded.add(stored.about.key)
    return finishes, rewarded
