"""Events, which are appended to a tape about a run, a rollout or a turn, and the tags and notes that they come to.

`annotations_of` reads the events of a rollout, in their order, as what holds now:

    tag     sets the tags of the whole rollout, in place of all that it had
    retag   adds tags to a rollout, a turn or some tokens, or takes some away
    note    adds a note, changes its text, or takes it back (its text is then null)
"""

import enum
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

BOOKMARK = "bookmark"  # the tag that stands for a bookmark
MOST_TAG_CHARACTERS = 100
MOST_NOTE_CHARACTERS = 20_000

TokenRange = tuple[int, int]  # [start, stop) among a turn's ids, those of its prompt first
_Place = tuple[str | None, TokenRange | None]


class EventKind(enum.StrEnum):
    """What may be said of a rollout or a turn after it was recorded; the latest of a kind counts."""

    FINISH = "finish"  # data: status, stop_reason, reason, turns (count per session)
    SCORE = "score"  # data: reward, terms
    DELIVERY = "delivery"  # data: delivery
    FILTER = "filter"  # data: reason, or null to take it back
    TAG = "tag"  # data: tags; sets those of the whole rollout
    RETAG = "retag"  # data: added, removed, tokens; changes the tags of a rollout, a turn, or some of its tokens
    NOTE = "note"  # data: note (its id), text (null to take it back), tokens
    VERSION = "version"  # data: version; announces a weight version of the run
    PRUNE = "prune"  # data: what was removed
    COLLECT = "collect"  # data: settings; a collection into the run has begun
    COLLECTED = "collected"  # data: step, source; a collection into the run has come to its end
    GROUP = "group"  # data: group, step, consumer, state (a GroupState), reason, to; what a trainer did with a group
    TRACE = "trace"  # data: step (null: at the end), and fields of a TraceStep; of each field the latest counts
    REFUSAL = "refusal"  # data: session, status, reason; a request of the agent's that was refused
    SUMMARY = "summary"  # data: a RolloutSummary, and covers: the order of the last event that it takes in


class Event(msgspec.Struct, frozen=True):
    """One appended statement. `(writer, sequence)` names it; `at_ns` orders it among all writers."""

    writer: str
    sequence: int
    at_ns: int
    kind: str  # an EventKind, or one that a newer minor version knows
    rollout: str | None  # None: about the run
    try_index: int | None
    turn: str | None  # None: about the whole rollout
    by: str | None
    data: dict[str, Any]

    @property
    def order(self) -> tuple[int, str, int]:
        return (self.at_ns, self.writer, self.sequence)


# The events that tags and notes follow from.
ANNOTATION_KINDS = (EventKind.TAG, EventKind.RETAG, EventKind.NOTE)


class Tag(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tag of a rollout, of a turn, or of some of its tokens."""

    name: str
    turn: str | None = None  # None: of the whole rollout
    tokens: TokenRange | None = None  # None: of the whole turn
    by: str | None = None
    at_ns: int | None = None  # None: the rollout was started with it


class Note(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A note on a rollout, on a turn, or on some of its tokens."""

    id: str
    text: str
    turn: str | None = None
    tokens: TokenRange | None = None
    by: str | None = None  # who wrote it first
    at_ns: int
    edited_by: str | None = None
    edited_at_ns: int | None = None  # None: nobody changed it


class Annotations(msgspec.Struct, frozen=True):
    """The tags and notes of one rollout, in the order in which they were given."""

    tags: tuple[Tag, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def rollout_tags(self) -> tuple[str, ...]:
        """The tags of the rollout as a whole."""
        return tuple(one.name for one in self.tags if one.turn is None)

    @property
    def inner_tags(self) -> tuple[str, ...]:
        """The tags of its turns and tokens, each once."""
        return tuple(dict.fromkeys(one.name for one in self.tags if one.turn is not None))


class _TagData(msgspec.Struct):
    tags: list[str]


class _RetagData(msgspec.Struct):
    added: list[str] = []
    removed: list[str] = []
    tokens: TokenRange | None = None


class _NoteData(msgspec.Struct):
    note: str
    text: str | None
    tokens: TokenRange | None = None


_DATA: dict[str, Any] = {EventKind.TAG: _TagData, EventKind.RETAG: _RetagData, EventKind.NOTE: _NoteData}


def parse_annotation(kind: str, data: dict[str, Any]) -> Any:
    """What such an event says, checked; raises msgspec.ValidationError if it says something else."""
    return msgspec.convert(data, _DATA[kind])


def annotations_of(events: Iterable[Event], launch_tags: Sequence[str] = ()) -> Annotations:
    """The tags and notes that a rollout has after these events, given in their order.

    `events` may be of any kind. Those that cannot be read are left out; the index names them as problems.
    """
    tags: dict[tuple[_Place, str], Tag] = {((None, None), name): Tag(name=name) for name in launch_tags}
    notes: dict[str, Note] = {}
    for event in events:
        if event.kind not in _DATA:
            continue
        try:
            said = parse_annotation(event.kind, event.data)
        except msgspec.ValidationError:
            continue
        if isinstance(said, _NoteData):
            _apply_note(notes, event, said)
        elif isinstance(said, _RetagData):
            _retag(tags, event, said)
        elif event.turn is None:
            before = {one.name: one for one in tags.values() if one.turn is None}
            tags = {place: one for place, one in tags.items() if one.turn is not None}
            for name in said.tags:
                tags[(None, None), name] = before.get(name) or Tag(name=name, by=event.by, at_ns=event.at_ns)
    return Annotations(tuple(tags.values()), tuple(notes.values()))


def _retag(tags: dict[tuple[_Place, str], Tag], event: Event, said: _RetagData) -> None:
    place = (event.turn, said.tokens)
    for name in said.removed:
        tags.pop((place, name), None)
    for name in said.added:
        given = Tag(name=name, turn=event.turn, tokens=said.tokens, by=event.by, at_ns=event.at_ns)
        tags.setdefault((place, name), given)


def _apply_note(notes: dict[str, Note], event: Event, said: _NoteData) -> None:
    known = notes.get(said.note)
    if said.text is None:
        notes.pop(said.note, None)
    elif known is None:
        notes[said.note] = Note(
            id=said.note, text=said.text, turn=event.turn, tokens=said.tokens, by=event.by, at_ns=event.at_ns
        )
    elif known.text != said.text:
        notes[said.note] = msgspec.structs.replace(known, text=said.text, edited_by=event.by, edited_at_ns=event.at_ns)
