"""`TapeWriter`: the journal of this process and its open rollouts. A tape and its recorders write through it."""

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from rolltape.errors import ClosedError, NoSuchRollout, RecordError
from rolltape.forking import call_in_child
from rolltape.records.ids import TurnPlace, parse_turn_id, parse_turn_of
from rolltape.records.rollout import EventKind, RolloutHead
from rolltape.records.trace import TraceStep
from rolltape.records.turn import Delivery
from rolltape.tape.index.index import NamedTries
from rolltape.tape.index.launch import LaunchCheck
from rolltape.tape.journal.entries import LoggedEvent, NewEvent, StartedRollout, StartedSession, encode_event
from rolltape.tape.journal.writing import Durability, Journal, Ticket
from rolltape.tape.recording.fields import as_count, as_member, as_text
from rolltape.tape.recording.intake import SessionIntake
from rolltape.tape.recording.rollout import RolloutRecorder
from rolltape.tape.recording.summaries import EndedHere, SummaryThread
from rolltape.tape.run import read
from rolltape.tape.rundir import RunDirectory
from rolltape.tape.stored import Key, Summarize


class EncodedEvents(NamedTuple):
    """Events to append, and the journal that they go to."""

    journal: Journal
    events: list[LoggedEvent]
    rollout: Key | None = None  # refused if another writer has taken it over

    def append(self) -> None:
        """Append the events. They are durable when this returns."""
        self.journal.append(*self.events, rollout=self.rollout)


class TapeWriter:
    """Writes one run from this process. Threads may share it. A forked child gets its own journal."""

    def __init__(self, directory: RunDirectory, durability: Durability, summarize: Summarize | None) -> None:
        self.directory = directory
        self.durability = durability
        self._summarize = summarize
        self.lock = threading.RLock()
        self._open: dict[Key, RolloutRecorder] = {}
        self._closed = False
        self._begin_journal()
        call_in_child(self, TapeWriter._leave_to_parent)

    def _begin_journal(self) -> None:
        self._journal = Journal(self.directory, self.durability)
        self.launch = LaunchCheck(self.directory, self._journal)
        self._summaries = None if self._summarize is None else SummaryThread(self._journal, self._summarize)
        # This also runs when the program ends without a close. Rollouts still open then count as lost.
        self._closer = weakref.finalize(self, _close, self._journal, self._summaries)

    def journal(self) -> Journal:
        """The journal of this process."""
        if self._closed:
            raise ClosedError(f"the tape of run {self.directory.name} is closed; open it again to record more")
        if self._journal.pid != os.getpid():
            _parents.append((self._journal, self.launch))
            self._begin_journal()
        return self._journal

    def start(self, head: RolloutHead, sessions: Sequence[SessionIntake] = ()) -> RolloutRecorder:
        """Record that a rollout begins, or that it continues here with its earlier sessions."""
        journal = self.journal()
        row = journal.next_rollout
        keyed = [(journal.new_session(), intake) for intake in sessions]
        entries = [StartedSession(session, row, intake.head) for session, intake in keyed]
        recorder = RolloutRecorder(self, journal, row, head, keyed)

        def stored() -> None:
            journal.next_rollout = row + 1
            self._open[head.key] = recorder

        journal.append(StartedRollout(row, head), *entries, rollout=head.key, stored=stored)
        return recorder

    def ended(self, head: RolloutHead, row: int, first_event: int) -> None:
        """Take a rollout off the list of open ones, and have it summarized if this journal holds all of it."""
        self._open.pop(head.key, None)
        if self._summaries is not None and not head.epoch:
            self._summaries.add(EndedHere(head.key, row, first_event), self)

    def close(self) -> None:
        """Record open rollouts as failed, and close the journal. A second call does nothing."""
        with self.lock:
            if self._closed:
                return
            try:
                if self._journal.pid == os.getpid():
                    for recorder in list(self._open.values()):
                        with contextlib.suppress(ClosedError):  # it has ended meanwhile, or was taken over
                            recorder.fail("the tape was closed before it finished")
            finally:
                self._closed = True
                self._closer()

    def latest_ns(self, rollout: str) -> int:
        """The time of another writer's latest event about a rollout, if it is ahead of our clock, else 0."""
        with self.lock:
            return 0 if self._closed or self._journal.pid != os.getpid() else self.launch.latest_ns(rollout)

    def encode_run_event(self, kind: EventKind, data: dict[str, Any]) -> EncodedEvents:
        """An event about the run as a whole, later than all others about it."""
        _check_event_data(kind, data, f"run {self.directory.name}")
        with self.lock:
            journal = self.journal()
            return EncodedEvents(journal, [encode_event(kind, None, data, after_ns=self.launch.latest_ns(None))])

    def encode_all(self, events: Iterable[NewEvent]) -> EncodedEvents:
        """Many events at once. Other writers' events are read only once, which is much faster."""
        with self.lock:
            journal = self.journal()
            with self.launch.still():
                return EncodedEvents(journal, [one for event in events for one in self.encode(event).events])

    def encode(self, event: NewEvent) -> EncodedEvents:
        """An event about a rollout on the tape, one for each of its tries that it applies to, later than all others."""
        kind, name, data, by, try_index, turn_id = event
        by = as_text(by, f"rollout {name}: by")
        name = as_text(name, "the id of a rollout") or ""
        _check_event_data(kind, data, f"rollout {name}")
        if try_index is not None:
            try_index = as_count(try_index, f"rollout {name}: try_index")
        with self.lock:
            journal = self.journal()
            named = self._find(name)
            turn = None if turn_id is None else parse_turn_of(turn_id, named.id, try_index)
            tries = self._tries_of(kind, named, try_index if turn is None else turn.try_index)
            after_ns = self.launch.latest_ns(named.id)
            if turn is not None:
                self._check_turn(turn)
            encoded = [
                encode_event(kind, (named.id, one), data, turn=turn_id, by=by, after_ns=after_ns) for one in tries
            ]
            return EncodedEvents(journal, encoded, turn.key if turn and kind is EventKind.DELIVERY else None)

    def encode_delivery(self, turn_id: str, delivery: Delivery | str) -> EncodedEvents:
        """The event that records whether a turn's reply arrived."""
        turn = parse_turn_id(turn_id)
        recorder = self._open.get(turn.key)
        if recorder is None:
            data = {"delivery": as_member(Delivery, delivery, f"turn {turn_id}").value}
            return self.encode(NewEvent(EventKind.DELIVERY, turn.rollout, data, turn=turn.id))
        self._check_turn(turn)
        event = recorder.sessions[turn.ordinal].encode_delivery(turn.id, delivery)
        return EncodedEvents(self.journal(), [event], turn.key)

    def submit_delivery(self, turn_id: str, delivery: Delivery | str) -> asyncio.Future[None]:
        """Append a delivery from a coroutine. The future is done when it is durable."""
        journal, events, rollout = self.encode_delivery(turn_id, delivery)
        return journal.submit_async(Ticket(events, rollout), None)

    def _find(self, name: str) -> NamedTries:
        """The rollout of an id, in any form that `Run.find` accepts, and its tries. Raises NoSuchRollout."""
        if tries := self.launch.tries(name):
            return NamedTries(name, tries)
        named = read(self.directory.path).find(name)
        self.launch.tries(named.id)  # loads how its tries ended, which `counted_try` needs
        return named

    def _tries_of(self, kind: EventKind, named: NamedTries, try_index: int | None) -> list[int]:
        """The tries that an event is about. A reward, a trace or a note is about the try that counts."""
        if try_index is not None:
            if try_index not in named.tries:
                tries = ", ".join(map(str, named.tries))
                raise NoSuchRollout(f"rollout {named.id} has no try {try_index}; it has {tries}")
            return [try_index]
        if kind in (EventKind.SCORE, EventKind.TRACE, EventKind.NOTE):
            return [self.launch.counted_try(named.id, named.tries)]
        return named.tries

    def _check_turn(self, turn: TurnPlace) -> None:
        """Refuse a turn that does not exist. This is known for rollouts that are open here or have ended."""
        recorder = self._open.get(turn.key)
        counts = self.launch.turns_of(turn.key) if recorder is None else recorder.turn_counts()
        if counts is None:
            return
        if turn.ordinal >= len(counts):
            raise NoSuchRollout(f"turn {turn.id}: its rollout has {len(counts)} sessions; give the id of a Turn")
        if turn.sequence >= counts[turn.ordinal]:
            raise NoSuchRollout(f"turn {turn.id}: its session has {counts[turn.ordinal]} turns; give the id of a Turn")

    def _leave_to_parent(self) -> None:
        """In a forked child: forget the parent's rollouts. The first write makes the child's own journal."""
        self.lock = threading.RLock()
        self._open = {}


def _close(journal: Journal, summaries: SummaryThread | None) -> None:
    if summaries is not None:
        summaries.close()
    journal.close()


# SQLite connections must not be carried across a fork, not even to close them: a child keeps them unused.
_parents: list[tuple[Journal, LaunchCheck]] = []


class _ScoreData(msgspec.Struct):
    reward: float
    terms: dict[str, float] | None = None


class _FilterData(msgspec.Struct):
    reason: str | None


class _VersionData(msgspec.Struct):
    version: str


class _PruneData(msgspec.Struct):
    pruned: str
    sampled_tokens: int = 0


class _CollectedData(msgspec.Struct):
    step: int
    source: str | None


class _CollectionSettings(_CollectedData):
    group_size: int


class _CollectData(msgspec.Struct):
    settings: _CollectionSettings


class _GroupData(msgspec.Struct):
    group: str
    step: int
    consumer: str
    state: str
    to: tuple[int, str, int] | None = None


class _TraceData(TraceStep, frozen=True, kw_only=True):
    index: int = 0  # `step` has it
    step: int | None = None
    amends: bool = False


# Of the kinds that readers rely on.
_RELIED_ON: dict[str, Any] = {
    EventKind.SCORE: _ScoreData,
    EventKind.FILTER: _FilterData,
    EventKind.VERSION: _VersionData,
    EventKind.PRUNE: _PruneData,
    EventKind.COLLECT: _CollectData,
    EventKind.COLLECTED: _CollectedData,
    EventKind.GROUP: _GroupData,
    EventKind.TRACE: _TraceData,
}


def _check_event_data(kind: str, data: object, where: str) -> None:
    """Raise RecordError for an event that readers could not read. Nobody can take an event back."""
    if kind == EventKind.FINISH:
        raise RecordError(
            f"{where}: a finish cannot be appended as an event; end a rollout with its finish() or fail()"
        )
    if kind in _RELIED_ON:
        try:
            msgspec.convert(data, _RELIED_ON[kind])
        except msgspec.ValidationError as error:
            raise RecordError(f"{where}: the data of a {kind} event: {error}; see EventKind") from None
