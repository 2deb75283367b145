"""Events: what is appended to a tape about a run, a rollout or a turn after it was recorded."""

import enum
from typing import Any

import msgspec


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
