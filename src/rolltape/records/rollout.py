"""A rollout: one attempt at one task, with its sessions, its events, and the state that follows from the events.

`outcome_of` computes a rollout's state from its events in order. `annotations_of` computes its tags and notes:

    tag     sets the tags of the whole rollout, in place of all that it had
    retag   adds tags to a rollout, a turn or some tokens, or takes some away
    note    adds a note, changes its text, or takes it back (its text is then null)
"""

import enum
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import msgspec

from rolltape.records.ids import split_in
from rolltape.records.jsonable import OpenRecord
from rolltape.records.turn import Turn, TurnFlag, implausible_in

BOOKMARK = "bookmark"  # the tag that stands for a bookmark
MOST_TAG_CHARACTERS = 100
MOST_NOTE_CHARACTERS = 20_000

TokenRange = tuple[int, int]  # [start, stop) among a turn's ids, those of its prompt first
_Place = tuple[str | None, TokenRange | None]


class Status(enum.StrEnum):
    """Where a rollout stands. Only a finished one has a reward; averages leave the others out."""

    RUNNING = "running"
    FINISHED = "finished"  # an outcome that its environment rewards, limits that the policy ran into included
    FAILED = "failed"  # the infrastructure broke it, or its recording block was left without a finish
    LOST = "lost"  # its writer died without a finish


# Begins the reason of a finished rollout whose reward could not be computed, or is computed later. Until it has a
# reward, it does not train.
UNGRADED = "ungraded: "


class StopReason(enum.StrEnum):
    """Why a finished rollout ended."""

    COMPLETED = "completed"
    TOOL_STOPPED = "tool_stopped"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    MAX_TOOL_CALLS = "max_tool_calls"
    CONTEXT_OVERFLOW = "context_overflow"
    PARSE_ERROR = "parse_error"
    TIMEOUT = "timeout"


class EventKind(enum.StrEnum):
    """What an event is about. For most kinds, the latest event counts."""

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
    COLLECTED = "collected"  # data: step, source; a collection into the run has ended
    GROUP = "group"  # data: group, step, consumer, state (a GroupState), reason, to, policy; what a trainer did with it
    TRACE = "trace"  # data: step (null: at the end), and fields of a TraceStep; the latest value of a field counts
    REFUSAL = "refusal"  # data: session, status, reason; a request of the agent's that was refused
    SUMMARY = "summary"  # data: a RolloutSummary, and covers: the order of the last event that it includes


class Event(msgspec.Struct, frozen=True):
    """An event. `(writer, sequence)` names it; `at_ns` orders it among the events of all writers."""

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


# The events that set tags and notes.
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
    edited_at_ns: int | None = None  # None: it was never edited


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


class RolloutCounts(msgspec.Struct, frozen=True):
    """How many turns and sampled tokens a rollout has, and which weight versions."""

    turns: tuple[int, ...]  # of each session
    sampled_tokens: int
    versions: tuple[str, ...]  # of the weights, as they first appear


class RolloutHead(OpenRecord, frozen=True, kw_only=True, omit_defaults=True):
    """A rollout's identity, decided at launch."""

    id: str
    try_index: int
    group: str
    run: str
    step: int
    attempt: int
    source: str | None = None  # its split included: "gsm8k#test"
    task_id: str | None = None
    task: Any = None
    model: str | None = None
    agent: str | None = None
    tags: tuple[str, ...] = ()
    foreign_ids: tuple[str, ...] = ()  # what other programs call it, such as a framework's own rollout id
    extra: dict[str, Any] = {}
    started_at_ns: int
    epoch: int = 0  # how often it was taken over from a writer that had died
    continues: str | None = None  # the writer that it was taken over from
    earlier: RolloutCounts | None = None  # what its earlier writers had recorded by then

    @property
    def key(self) -> tuple[str, int]:
        return (self.id, self.try_index)

    @property
    def split(self) -> str | None:
        """The split of its source; None if the source names none."""
        return split_in(self.source)


class SessionHead(OpenRecord, frozen=True, kw_only=True, omit_defaults=True):
    """One agent's connection: the defaults that its turns share."""

    id: str
    ordinal: int
    tool_ids_matter: bool = False  # the model samples and renders tool-call ids, so they count in comparisons
    stop_ids: tuple[int, ...] | None = None  # None: not known, so a missing stop id cannot be noticed
    vocabulary: int | None = None  # one more than the tokenizer's largest id; None: not known
    flags_faults: bool = False  # its turns flag implausible replies; false: written by 0.1, which did not check
    tokenizer: str | None = None  # where its text form can be found: a path or a name
    root: str | None = None  # digest of the tools and template options of its turns, unless a turn has its own
    defaults: dict[str, str] = {}  # model, renderer, fingerprint and logprob_kind, in the same way
    extra: dict[str, Any] = {}


class Session:
    """One agent's connection and its turns in order."""

    def __init__(self, head: SessionHead, turns: Sequence[Turn], folder: str | None = None) -> None:
        self.head = head
        self.turns = tuple(turns)
        self.folder = folder  # of the run that it was read from; None: it was not read from one

    @property
    def id(self) -> str:
        return self.head.id

    @property
    def ordinal(self) -> int:
        return self.head.ordinal

    @property
    def tokenizers(self) -> tuple[str, ...]:
        """Where the text of its ids may be found, best first: in the folder of its run, else as the head names it."""
        name = self.head.tokenizer
        places = () if name is None else (os.path.join(self.folder or "", name), name)  # noqa: PTH118 - or a URL
        return tuple(dict.fromkeys(places))

    def unstated_faults(self, vocabulary: int | None = None) -> dict[int, str]:
        """The turns that no engine can have sampled but that have no flag for it, by sequence number, and why.

        A session has none if its recorder checks. `vocabulary` is used if the session does not state its own.
        """
        if self.head.flags_faults:
            return {}
        found = {}
        for turn in self.turns:
            facts = turn.facts
            if facts.is_engine_fault or TurnFlag.NOT_TOKEN_FAITHFUL in facts.flags:
                continue
            why = implausible_in(self.head, facts, turn.sampled_ids, turn.logprobs, vocabulary)
            if why is not None:
                found[turn.sequence] = why
        return found

    def _repr_html_(self) -> str:
        from rolltape.notebook import session_html

        return session_html(self)


class Rollout:
    """One attempt at one task, as the tape has it now: its identity, its sessions with their turns, and its events.

    Example:

        rollout = rolltape.read("runs/exp1").rollout("857bc8a1")
        print(rollout.status, rollout.reward, len(rollout.turns))
    """

    def __init__(
        self, head: RolloutHead, sessions: Sequence[Session], events: Sequence[Event], writer_alive: bool
    ) -> None:
        self.head = head
        self.sessions = tuple(sessions)
        self.events = tuple(sorted(events, key=lambda event: event.order))
        self.writer_alive = writer_alive

    @property
    def id(self) -> str:
        return self.head.id

    @property
    def key(self) -> tuple[str, int]:
        return self.head.key

    @cached_property
    def outcome(self) -> "Outcome":
        return outcome_of(self.events, self.writer_alive, self.head.tags)

    @cached_property
    def annotations(self) -> Annotations:
        """The tags and notes that it has, those of its turns and tokens included."""
        return annotations_of(self.events, self.head.tags)

    @property
    def status(self) -> Status:
        return self.outcome.status

    @property
    def reward(self) -> float | None:
        return self.outcome.reward

    @property
    def turns(self) -> list[Turn]:
        return [turn for session in self.sessions for turn in session.turns]

    def __repr__(self) -> str:
        return f"Rollout({self.id}, try={self.head.try_index}, {self.status}, turns={len(self.turns)})"

    def _repr_html_(self) -> str:
        from rolltape.notebook import rollout_html

        return rollout_html(self)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The state that a rollout's events give: the latest of each kind counts."""

    status: Status
    stop_reason: StopReason | None = None
    reason: str | None = None
    reward: float | None = None  # None: none was given, or the rollout did not finish
    reward_terms: dict[str, float] = {}
    rewarded_by: str | None = None
    filtered: str | None = None  # why it is kept out of training
    tags: tuple[str, ...] = ()  # of the rollout as a whole


def outcome_of(events: Sequence[Event], writer_alive: bool, launch_tags: Sequence[str] = ()) -> Outcome:
    """Compute a rollout's current state from its events in order. It was started with `launch_tags`."""
    latest = {event.kind: event for event in events if event.turn is None}
    finish = latest.get(EventKind.FINISH)
    score = latest.get(EventKind.SCORE)
    filtered = latest.get(EventKind.FILTER)
    if finish is None:
        status = Status.RUNNING if writer_alive else Status.LOST
        reason = None if writer_alive else "its writer ended, and the tape shows no finish"
    else:
        status, reason = Status(finish.data["status"]), finish.data.get("reason")
    rewarded = score is not None and status is Status.FINISHED
    ungraded = None
    if status is Status.FINISHED and reason is not None and reason.startswith(UNGRADED):
        reason = ungraded = None if rewarded else reason
    return Outcome(
        status=status,
        stop_reason=StopReason(finish.data["stop_reason"]) if finish and finish.data.get("stop_reason") else None,
        reason=reason,
        reward=score.data["reward"] if score and rewarded else None,
        reward_terms=score.data.get("terms", {}) if score and rewarded else {},
        rewarded_by=score.by if score and rewarded else None,
        filtered=(filtered.data.get("reason") if filtered else None) or ungraded,
        tags=annotations_of(events, launch_tags).rollout_tags,
    )


def pruned_of(events: Iterable[Event]) -> tuple[str, ...]:
    """What was pruned of a rollout: "turns", or "side array NAME"."""
    found = (event.data.get("pruned") for event in events if event.kind == EventKind.PRUNE)
    return tuple(dict.fromkeys(str(what) for what in found if what))


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
    """Parse and check the data of a tag or note event. Raises msgspec.ValidationError if it is invalid."""
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
            annotation = parse_annotation(event.kind, event.data)
        except msgspec.ValidationError:
            continue
        if isinstance(annotation, _NoteData):
            _apply_note(notes, event, annotation)
        elif isinstance(annotation, _RetagData):
            _retag(tags, event, annotation)
        elif event.turn is None:
            before = {one.name: one for one in tags.values() if one.turn is None}
            tags = {place: one for place, one in tags.items() if one.turn is not None}
            for name in annotation.tags:
                tags[(None, None), name] = before.get(name) or Tag(name=name, by=event.by, at_ns=event.at_ns)
    return Annotations(tuple(tags.values()), tuple(notes.values()))


def _retag(tags: dict[tuple[_Place, str], Tag], event: Event, data: _RetagData) -> None:
    place = (event.turn, data.tokens)
    for name in data.removed:
        tags.pop((place, name), None)
    for name in data.added:
        given = Tag(name=name, turn=event.turn, tokens=data.tokens, by=event.by, at_ns=event.at_ns)
        tags.setdefault((place, name), given)


def _apply_note(notes: dict[str, Note], event: Event, data: _NoteData) -> None:
    known = notes.get(data.note)
    if data.text is None:
        notes.pop(data.note, None)
    elif known is None:
        notes[data.note] = Note(
            id=data.note, text=data.text, turn=event.turn, tokens=data.tokens, by=event.by, at_ns=event.at_ns
        )
    elif known.text != data.text:
        notes[data.note] = msgspec.structs.replace(known, text=data.text, edited_by=event.by, edited_at_ns=event.at_ns)
