"""A rollout as it lies on a tape, the same whether it comes from a journal or a shard, and what a place that holds some
can be asked. JSON stays in bytes here, so that fields of a newer version survive whatever rewrites it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from rolltape.records.jsonable import decode_numbers
from rolltape.records.messages import Message, Root
from rolltape.records.rollout import Event, RolloutHead
from rolltape.records.tokens import Ids
from rolltape.records.turn import Logprobs, SideArray

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


class StoredEvent(msgspec.Struct, frozen=True):
    """An event and the bytes it was read from."""

    event: Event
    body: bytes

    @property
    def key(self) -> tuple[str, int]:
        return (self.event.writer, self.event.sequence)


class HeldRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout as a source lists it, without its turns."""

    head: RolloutHead
    raw_head: bytes
    writer: str
    turns: tuple[int, ...]  # per session
    sampled_tokens: int
    versions: tuple[str, ...]  # weight versions, as they first appear

    @property
    def key(self) -> Key:
        return self.head.key


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
    # A run has many events: the slow reading is for those with numbers that JSON lacks.
    fields: dict[str, Any] = decode_numbers(body) if b'"$float"' in body else msgspec.json.decode(body)
    event = Event(
        writer=writer,
        sequence=sequence,
        at_ns=fields["at_ns"],
        kind=fields["kind"],
        rollout=fields.get("rollout"),
        try_index=fields.get("try"),
        turn=fields.get("turn"),
        by=fields.get("by"),
        data=fields["data"],
    )
    return StoredEvent(event, body)
