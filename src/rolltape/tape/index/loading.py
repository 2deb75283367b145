"""Loads a rollout from the places that the index has for it: joins its parts and rebuilds its turns."""

import contextlib
import sqlite3
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from rolltape.errors import DamagedTapeError
from rolltape.records.ids import session_id
from rolltape.records.jsonable import decode_record
from rolltape.records.messages import Message, MessageChain
from rolltape.records.rollout import Event, EventKind, Rollout, RolloutHead, Session, SessionHead, pruned_of
from rolltape.records.turn import Delivery, TokenChain, Turn, TurnFacts
from rolltape.tape.index.sources import Reader, RunSources
from rolltape.tape.journal.reading import JournalSource
from rolltape.tape.stored import (
    Key,
    Problem,
    StoredEvent,
    StoredSession,
    StoredTurn,
    counts_for,
    join_sessions,
    read_errors,
)

_SOURCES_HELD = 8


class PartPlace(NamedTuple):
    """Where one writer's part of a rollout lies."""

    source: str
    row: int
    first_event: int
    last_event: int
    writer: str
    has_turns: bool = True  # turns are read from there; else only events


class Located(NamedTuple):
    """Where a rollout lies: its parts, with its owner's last, and its events that lie elsewhere."""

    key: Key
    parts: tuple[PartPlace, ...]
    apart: tuple[StoredEvent, ...]
    alive: bool


class Loader:
    """Loads rollouts of one run, and keeps the last sources open. For one thread at a time."""

    def __init__(self, sources: RunSources, location: str) -> None:
        self._sources = sources
        self._location = location
        self._held: dict[str, Reader] = {}

    def load(self, located: Located) -> tuple[Rollout, list[Problem]]:
        """A rollout with its turns and events, and what is missing of it.

        Raises DamagedTapeError if it is no longer there, for example because it was sealed in the meantime.
        """
        for fresh in (False, True):
            try:
                rollout, problems = self._loaded(located, fresh=fresh)
            except read_errors() as error:
                failure = error
                continue
            # Something may be missing because the file was replaced in the meantime.
            if fresh or not problems:
                return rollout, problems
        raise DamagedTapeError(f"rollout {located.key[0]}: {failure}") from failure

    def messages(self, located: Located) -> list[Message]:
        """Each message of a rollout once, in the order in which they came, without its tokens.

        Raises DamagedTapeError if it is no longer there. Damaged messages are left out.
        """
        found: dict[bytes, Message] = {}
        try:
            for part in located.parts:
                source = self._source(part.source, fresh=False)
                self._head(source, part, located.key)
                for message in source.messages(part.row):
                    found.setdefault(message.digest, message)
        except read_errors() as error:
            raise DamagedTapeError(f"rollout {located.key[0]}: {error}") from error
        return list(found.values())

    def close(self) -> None:
        """Close all files."""
        for source in self._held.values():
            with contextlib.suppress(OSError, sqlite3.Error):
                source.close()
        self._held.clear()

    def _loaded(self, located: Located, *, fresh: bool) -> tuple[Rollout, list[Problem]]:
        owner = located.parts[-1]
        head: RolloutHead | None = None
        found = {stored.key: stored for stored in located.apart}
        sessions: list[StoredSession] = []
        problems: list[Problem] = []
        for part in located.parts:
            source = self._source(part.source, fresh=fresh)
            head = self._head(source, part, located.key)
            before = set(source.problems())
            first = part.first_event
            if isinstance(source, JournalSource) and part.last_event < first:
                first = source.first_event_since(head.started_at_ns)
            last = part.last_event if part is not owner or not located.alive else source.last_event()
            for _, stored in source.numbered_events(first, last) if last >= first else ():
                if stored.about.key == located.key:
                    found[stored.key] = stored
            if part.has_turns:
                sessions = join_sessions([sessions, source.stored(part.row, head)])
            problems += [one for one in source.problems() if one not in before]
        assert head is not None
        events = counted_events(found.values(), owner.writer)
        pruned = pruned_of(events)  # pruned for readers at once, also in copies that a live writer still holds
        where = self._source(owner.source, fresh=False).where
        rollout, missing = rebuilt(
            head,
            [without(session, pruned) for session in sessions] if pruned else sessions,
            events,
            located.alive,
            where,
            self._location,
        )
        return rollout, [*problems, *missing]

    def _head(self, source: Reader, part: PartPlace, key: Key) -> RolloutHead:
        found = next(iter(source.heads(part.row, part.row)), None)
        if found is None or found.head.key != key:
            raise DamagedTapeError(f"rollout {key[0]} is not in row {part.row} of {part.source}")
        return found.head

    def _source(self, name: str, *, fresh: bool) -> Reader:
        if fresh and name in self._held:
            self._held.pop(name).close()
        if name not in self._held:
            if len(self._held) >= _SOURCES_HELD:
                self._held.pop(next(iter(self._held))).close()
            self._held[name] = self._sources.open(name)
        return self._held[name]


def counted_events(stored: Iterable[StoredEvent], owner: str) -> list[Event]:
    """The events of a rollout in their order; only its owner finishes it. A summary is no part of its history."""
    counted = [one for one in stored if one.about.kind != EventKind.SUMMARY and counts_for(one, owner)]
    return [one.event for one in sorted(counted, key=lambda one: one.order)]


def without(session: StoredSession, pruned: Sequence[str]) -> StoredSession:
    """A session without what was pruned of it, in the words of `pruned_of`."""
    if "turns" in pruned:
        return StoredSession(session.head, session.ordinal, [])
    gone = {one.removeprefix("side array ") for one in pruned}
    turns = [
        msgspec.structs.replace(turn, side={name: side for name, side in turn.side.items() if name not in gone})
        for turn in session.turns
    ]
    return StoredSession(session.head, session.ordinal, turns)


def rebuilt(
    head: RolloutHead,
    stored: Sequence[StoredSession],
    events: Sequence[Event],
    alive: bool,
    where: str,
    folder: str | None = None,
) -> tuple[Rollout, list[Problem]]:
    """The rollout with all turns that can be read, and what is missing of it. `folder` is that of its run."""
    problems: list[Problem] = []
    in_order = sorted(events, key=lambda event: event.order)
    facts_later = _later_facts(in_order)
    pruned = pruned_of(in_order)
    sessions: list[Session] = []
    for session in sorted(stored, key=lambda one: one.ordinal):
        try:
            session_head = decode_record(session.head, SessionHead, f"session {session.ordinal} of rollout {head.id}")
        except DamagedTapeError as error:
            problems.append(Problem(where, str(error), f"session {session.ordinal} of rollout {head.id}"))
            continue
        turns, missing = _turns_of(session_head.id, session.turns, facts_later, where)
        problems += missing
        sessions.append(Session(session_head, turns, folder))
    if "turns" not in pruned:
        problems += _missing_at_the_end(head, sessions, stored, in_order, where)
        problems += _events_of_no_turn(head, stored, in_order)
    return Rollout(head, sessions, in_order, alive), problems


def _turns_of(
    session: str, stored: Sequence[StoredTurn], later: dict[str, dict[str, object]], where: str
) -> tuple[list[Turn], list[Problem]]:
    built: dict[int, Turn] = {}
    problems: list[Problem] = []
    expected = 0
    for turn in sorted(stored, key=lambda one: one.sequence):
        if turn.sequence > expected:
            gone = f"turn {session}.{expected}" + (f" to .{turn.sequence - 1}" if turn.sequence - expected > 1 else "")
            problems.append(Problem(where, f"session {session} has a gap before turn {turn.sequence}", gone))
        expected = turn.sequence + 1
        name = f"turn {session}.{turn.sequence}"
        parent = None if turn.parent is None else built.get(turn.parent)
        if turn.parent is not None and parent is None:
            problems.append(Problem(where, f"{name} is coded against turn {turn.parent}, which is lost", name))
            continue
        try:
            built[turn.sequence] = _turn(session, turn, parent, later.get(f"{session}.{turn.sequence}"), name)
        except DamagedTapeError as error:
            problems.append(Problem(where, str(error), name))
    return list(built.values()), problems


def _turn(session: str, stored: StoredTurn, parent: Turn | None, later: dict[str, object] | None, name: str) -> Turn:
    kept = (len(parent.tokens), len(parent.messages)) if parent else (0, 0)
    if stored.keep_tokens > kept[0] or stored.keep_messages > kept[1]:
        raise DamagedTapeError(
            f"{name} keeps {stored.keep_tokens} tokens and {stored.keep_messages} messages of a turn with {kept}"
        )
    facts = decode_record(stored.facts, TurnFacts, name)
    return Turn(
        session=session,
        sequence=stored.sequence,
        root=stored.root,
        prompt=MessageChain(stored.messages, parent.messages if parent else None, stored.keep_messages),
        prompt_tokens=TokenChain(stored.new_ids, parent.tokens if parent else None, stored.keep_tokens),
        reply=stored.reply,
        sampled_ids=stored.sampled_ids,
        logprobs=stored.logprobs,
        facts=msgspec.structs.replace(facts, **later) if later else facts,
        side=stored.side,
    )


def _later_facts(events: Sequence[Event]) -> dict[str, dict[str, object]]:
    """The facts that later events change, by turn: its delivery and its reward."""
    later: dict[str, dict[str, object]] = {}
    for event in events:
        if event.turn is None:
            continue
        if event.kind == EventKind.DELIVERY:
            later.setdefault(event.turn, {})["delivery"] = Delivery(event.data["delivery"])
        elif event.kind == EventKind.SCORE:
            later.setdefault(event.turn, {})["reward"] = event.data["reward"]
    return later


def _events_of_no_turn(head: RolloutHead, stored: Sequence[StoredSession], events: Sequence[Event]) -> list[Problem]:
    """Events about turns that never existed. A lost turn that was counted is reported as lost elsewhere."""
    ends = {one.ordinal: one.end for one in stored}
    for event in events:
        if event.kind == EventKind.FINISH:
            for ordinal, count in enumerate(event.data.get("turns", [])):
                ends[ordinal] = max(count, ends.get(ordinal, 0))
    end_of = {session_id(*head.key, ordinal): end for ordinal, end in ends.items()}
    problems = []
    for event in events:
        if event.turn is None:
            continue
        session, _, sequence = event.turn.rpartition(".")
        if not (sequence.isascii() and sequence.isdecimal() and int(sequence) < end_of.get(session, 0)):
            what = f"its {event.kind} is of turn {event.turn}, which rollout {head.id} does not have"
            problems.append(Problem(f"event {event.sequence} of {event.writer}", what, ""))
    return problems


def _missing_at_the_end(
    head: RolloutHead, sessions: Sequence[Session], stored: Sequence[StoredSession], events: Sequence[Event], where: str
) -> list[Problem]:
    """Turns that the finish counted and that are missing after the last turn found."""
    finish = next((event for event in reversed(events) if event.kind == EventKind.FINISH), None)
    if finish is None:
        return []
    problems = []
    found = {session.ordinal: session for session in sessions}
    ends = {one.ordinal: one.end for one in stored}
    for ordinal, count in enumerate(finish.data.get("turns", [])):
        name = found[ordinal].id if ordinal in found else f"{head.id}.{head.try_index}.{ordinal}"
        if ordinal not in ends:
            problems.append(Problem(where, f"session {name} is missing", f"session {name} with {count} turns"))
        elif ends[ordinal] < count:
            what = f"session {name} had {count} turns when it finished, {ends[ordinal]} are found"
            problems.append(Problem(where, what, f"turn {name}.{ends[ordinal]} to .{count - 1}"))
    return problems
