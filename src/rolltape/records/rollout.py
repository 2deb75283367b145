"""A rollout: one attempt at one task, its sessions, and what was said of it afterwards."""

import enum
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec

from rolltape.records.events import Annotations, annotations_of
from rolltape.records.events import Event as Event
from rolltape.records.events import EventKind as EventKind
from rolltape.records.ids import split_in
from rolltape.records.jsonable import OpenRecord
from rolltape.records.turn import Turn, TurnFlag, implausible_in


class Status(enum.StrEnum):
    """Where a rollout stands. Only a finished one has a reward; averages leave the others out."""

    RUNNING = "running"
    FINISHED = "finished"  # an outcome that its environment rewards, limits that the policy ran into included
    FAILED = "failed"  # the infrastructure broke it, or its recording block was left without a finish
    LOST = "lost"  # its writer died without a finish


# Begins the reason of a finished rollout whose reward could not be computed, or is computed later. Until it has one it
# does not train.
UNGRADED = "ungraded: "
# Raised when the summary of the same rollout would come to other counts than before.
SUMMARY_RULES = 5


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


class EarlierParts(msgspec.Struct, frozen=True):
    """How much of a rollout its earlier writers had recorded when it was taken over."""

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
    earlier: EarlierParts | None = None

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
    flags_faults: bool = False  # its turns say what cannot have been sampled; false: 0.1 wrote it, which did not look
    tokenizer: str | None = None  # where its text form can be found: a path or a name
    root: str | None = None  # digest of the tools and template options of its turns, unless a turn has its own
    defaults: dict[str, str] = {}  # model, renderer, fingerprint and logprob_kind of its turns, likewise
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
        """The turns that no engine can have sampled and that do not say so, by sequence number, and why.

        There are none in a session of a recorder that looks. `vocabulary` is for a session that does not say it.
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
    """What a rollout's events come to: the latest of each kind."""

    status: Status
    stop_reason: StopReason | None = None
    reason: str | None = None
    reward: float | None = None  # None: none was given, or the rollout did not finish
    reward_terms: dict[str, float] = {}
    rewarded_by: str | None = None
    filtered: str | None = None  # why it is kept out of training
    tags: tuple[str, ...] = ()  # of the rollout as a whole


def outcome_of(events: Sequence[Event], writer_alive: bool, launch_tags: Sequence[str] = ()) -> Outcome:
    """Read a rollout's events, given in their order, as its present state. `launch_tags` it was started with."""
    latest = {event.kind: event for event in events if event.turn is None}
    finish = latest.get(EventKind.FINISH)
    score = latest.get(EventKind.SCORE)
    filtered = latest.get(EventKind.FILTER)
    if finish is None:
        status = Status.RUNNING if writer_alive else Status.LOST
        reason = None if writer_alive else "its writer ended without finishing it"
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


class PolicySummary(msgspec.Struct, frozen=True):
    """A rollout under one policy. The ledger is as if it were not filtered: a filter is looked up by itself."""

    key: str  # of the policy
    samples: int
    ledger: dict[str, int]  # sampled tokens by fate


class BehaviorCounts(msgspec.Struct, frozen=True):
    """What a rollout's replies and tools did, counted from its messages. Auxiliary calls are left out."""

    cut_replies: int  # replies that a limit on tokens ended
    tool_results: int
    tool_errors: int  # tool results that are errors
    test_edits: int  # tool calls that change files of tests


class RolloutSummary(msgspec.Struct, frozen=True):
    """What lists and plots show of a rollout: its branches, its forks by cause, its ledger under each preset, and what
    its replies did."""

    rules: int  # the SUMMARY_RULES by which it was counted
    branches: int
    forks: dict[str, int]  # by cause
    policies: dict[str, PolicySummary]  # by the policy's name
    behavior: BehaviorCounts | None  # None: its turns are no longer on the tape
