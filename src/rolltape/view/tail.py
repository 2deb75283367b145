"""A journal followed while it is written: what came since the last look, at the cost of what is new."""

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec

from rolltape.records.jsonable import decode_numbers
from rolltape.records.rollout import EventKind, RolloutHead
from rolltape.tape.index.stretches import JournalStretches
from rolltape.tape.stored import About, StoredEvent
from rolltape.view.reports import Counted, Key, Place, Placed, Report, Said, Spot, Started

_GAPS_WATCHED = 256  # numbers that were given away and not written yet: a writer has no more open at once
_CHANGES = (EventKind.PRUNE, EventKind.DELIVERY)  # change what a summary comes to, beside what decides the outcome


class OpenRollout(msgspec.Struct, array_like=True):
    """A rollout that has not ended, as far as it was read."""

    row: int
    sessions: list[tuple[int, int]]  # number and turns read of each
    events: tuple[int, int]  # its own, from the first to the last
    sampled_tokens: int = 0
    versions: list[str] = []

    @property
    def place(self) -> tuple[tuple[int, int], tuple[int, int]]:
        numbers = [number for number, _ in self.sessions]
        return (min(numbers, default=0), max(numbers, default=-1)), self.events


class TailMark(msgspec.Struct):
    """How far a journal was read."""

    next_rollout: int = 1
    next_session: int = 1
    next_event: int = 0
    missing_rollouts: list[int] = []
    missing_sessions: list[int] = []
    open: dict[str, OpenRollout] = {}  # by rollout and try, see `_name`
    just_ended: tuple[str, int] | None = None  # and the event that comes with its finish
    ended: bool = False  # its writer was gone when it was last read


def journal_news(journal: JournalStretches, mark: TailMark, max_events: int) -> Iterator[Report]:
    """What came since `mark`, which moves on with it; at most so many events at a time."""
    source = f"journal/{journal.writer}"
    # Rollouts before their events, and no event that came after: what an event is about is then known.
    last = min(journal.last_event(), mark.next_event + max_events - 1)
    rows = {one.row: name for name, one in mark.open.items()}
    for row, head in _heads(journal, mark):
        rows[row] = _name(head.key)
        mark.open[rows[row]] = OpenRollout(row, [], (0, -1))
        yield started(head, journal.writer, Place(source, row))
    for session, row in _sessions(journal, mark):
        if row in rows:
            mark.open[rows[row]].sessions.append((session, 0))
    for number, stored in journal.said(mark.next_event, last):
        mark.next_event = number + 1
        yield from _heard(journal, mark, source, number, stored)
    mark.next_event = max(mark.next_event, last + 1)
    if mark.next_event <= journal.last_event():
        return  # most of those that are open here have ended, as the rest of the events tells
    yield from _grown(journal, mark)
    mark.ended = not journal.alive
    if mark.ended:
        for name, one in mark.open.items():
            yield Placed(_key(name), journal.writer, Place(source, one.row, *one.place))
        mark.open.clear()


def _heads(journal: JournalStretches, mark: TailMark) -> Iterator[tuple[int, RolloutHead]]:
    for row in list(mark.missing_rollouts):
        for found in journal.heads(row, row):
            mark.missing_rollouts.remove(row)
            yield found.row, found.head
    for found in journal.heads(mark.next_rollout, 2**62):
        mark.missing_rollouts += range(max(mark.next_rollout, found.row - _GAPS_WATCHED), found.row)
        mark.next_rollout = found.row + 1
        yield found.row, found.head
    del mark.missing_rollouts[:-_GAPS_WATCHED]


def _sessions(journal: JournalStretches, mark: TailMark) -> Iterator[tuple[int, int]]:
    for session in list(mark.missing_sessions):
        for found in journal.sessions(session, session):
            mark.missing_sessions.remove(session)
            yield found
    for session, row in journal.sessions(mark.next_session, 2**62):
        mark.missing_sessions += range(max(mark.next_session, session - _GAPS_WATCHED), session)
        mark.next_session = session + 1
        yield session, row
    del mark.missing_sessions[:-_GAPS_WATCHED]


def _heard(
    journal: JournalStretches, mark: TailMark, source: str, number: int, stored: StoredEvent
) -> Iterator[Report]:
    about, name = stored.about, _name(stored.about.key)
    own = mark.open.get(name)
    if own is not None:
        own.events = (own.events[0] if own.events[1] >= 0 else number, number)
    lies_there = own is not None or mark.just_ended == (name, number)
    spot = None if lies_there or about.rollout is None else Spot(stored.writer, stored.sequence, source, number)
    if spot is not None or matters(about):
        yield said(stored, spot)
    if own is not None and about.kind == EventKind.FINISH and about.turn is None:
        # The score that comes with a finish follows it at once, in the same transaction.
        for after, score in journal.said(number + 1, number + 1):
            if score.about.key == about.key:
                mark.just_ended = (name, after)
                own.events = (own.events[0], after)
        yield _counted(journal, about.key, own, stored)
        yield Placed(about.key, journal.writer, Place(source, own.row, *own.place))
        del mark.open[name]


def _counted(journal: JournalStretches, key: Key, own: OpenRollout, finish: StoredEvent) -> Counted:
    """The counts of a rollout that has ended, as its finish says them, else by its turns."""
    data = finish.event.data
    if "sampled_tokens" in data:
        versions = tuple(data.get("versions", ()))
        return Counted(key, journal.writer, sum(data["turns"]), int(data["sampled_tokens"]), versions)
    _count(journal, own)
    return _count_of(journal, key, own)


def _grown(journal: JournalStretches, mark: TailMark) -> Iterator[Report]:
    """The turns that running rollouts have got since."""
    for name, one in mark.open.items():
        if _count(journal, one):
            yield _count_of(journal, _key(name), one)
            place = Place(f"journal/{journal.writer}", one.row, *one.place)
            yield Placed(_key(name), journal.writer, place, in_full=False)


def _count(journal: JournalStretches, one: OpenRollout) -> bool:
    """Count the turns that were not counted yet; whether there were some."""
    grew = False
    for place, (session, known) in enumerate(one.sessions):
        for sequence, sampled, facts in journal.sampled_since(session, known):
            one.sessions[place] = (session, sequence + 1)
            one.sampled_tokens += sampled
            one.versions += [version for version in versions_in(facts) if version not in one.versions]
            grew = True
    return grew


def _count_of(journal: JournalStretches, key: Key, one: OpenRollout) -> Counted:
    turns = sum(turns for _, turns in one.sessions)
    return Counted(key, journal.writer, turns, one.sampled_tokens, tuple(one.versions))


def versions_in(facts: bytes) -> list[str]:
    """The weight versions that a turn's facts name."""
    found: dict[str, None] = {}
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        for segment in decode_numbers(facts)["segments"]:
            named = (segment.get(field) for field in ("first_version", "last_version"))
            found.update({version: None for version in named if version is not None})
    return list(found)


def started(head: RolloutHead, writer: str, place: Place) -> Started:
    """What a list shows of a head."""
    return Started(
        key=head.key,
        group=head.group,
        step=head.step,
        attempt=head.attempt,
        source=head.source,
        task=head.task_id,
        environment=_environment(head),
        agent=head.agent,
        model=head.model,
        tags=head.tags,
        started_ns=head.started_at_ns,
        writer=writer,
        place=place,
    )


def _environment(head: RolloutHead) -> str | None:
    """As its task names it, else as whoever recorded it did."""
    task: Any = head.task if isinstance(head.task, dict) else {}
    named = task.get("environment") or head.extra.get("environment")
    return named if isinstance(named, str) else None


def matters(about: About) -> bool:
    """Whether a statement changes what is known of a rollout that lies with its other events."""
    return about.turn is None and about.kind not in (EventKind.TRACE, EventKind.DELIVERY)


def said(stored: StoredEvent, spot: Spot | None) -> Said:
    """A statement as it is told on; what a trace says is left where it lies."""
    about = stored.about
    data = {} if about.turn is not None or about.kind == EventKind.TRACE else stored.event.data
    key = None if about.rollout is None else about.key
    kind = about.kind if about.turn is None or about.kind in _CHANGES else f"turn {about.kind}"
    return Said(key, kind, about.at_ns, stored.writer, data, spot)


def _name(key: Key) -> str:
    return f"{key[0]}.{key[1]}"


def _key(name: str) -> Key:
    rollout, _, try_index = name.rpartition(".")
    return rollout, int(try_index)
