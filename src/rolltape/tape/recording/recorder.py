"""Recording: a tape gives rollouts, a rollout gives sessions, a session takes turns. Durable when the call returns."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from rolltape.errors import ClosedError, RecordError, TakenOverError, TapeWriteError
from rolltape.records.ids import session_id
from rolltape.records.jsonable import as_float
from rolltape.records.rollout import Event, EventKind, RolloutHead, SessionHead, Status, StopReason
from rolltape.records.turn import Finish, LogprobKind, Turn
from rolltape.tape.index.standing import packed
from rolltape.tape.journal.entries import EndedRollout, LoggedEvent, RecordedTurn, StartedSession, facts_json
from rolltape.tape.journal.schema import MAX_TURNS
from rolltape.tape.journal.ticks import running_loop
from rolltape.tape.journal.writing import Journal, Ticket
from rolltape.tape.recording.arrays import as_ids
from rolltape.tape.recording.fields import TurnFields, as_member, as_settings, as_text
from rolltape.tape.recording.intake import CodedTurn, SessionIntake

if TYPE_CHECKING:
    from rolltape.tape.recording.tape import Tape


class SessionRecorder:
    """Records the turns of one session: one agent's connection. Threads and coroutines may share it.

    Example:

        session = rollout.session(tokenizer="checkpoints/qwen3-8b")
        turn = session.record_turn(
            prompt_messages=[{"role": "user", "content": "2 + 2?"}],
            prompt_ids=[1, 2, 3],
            sampled_ids=[4, 5],
            logprobs=[-0.1, -0.2],
            reply={"role": "assistant", "content": "4"},
            finish="stop",
        )
    """

    def __init__(self, rollout: "RolloutRecorder", pk: int, intake: SessionIntake) -> None:
        self._rollout = rollout
        self._pk = pk
        self._intake = intake  # its last turns, one per ticket that is not settled, may yet be refused
        self._tickets: deque[Ticket] = deque()
        self.lock = threading.RLock()
        self.turn_count = 0
        self.sampled_tokens = 0
        self.versions: dict[str, None] = {}
        for turn in intake.turns:
            self._count(turn)

    @property
    def id(self) -> str:
        return self._intake.head.id

    @property
    def head(self) -> SessionHead:
        return self._intake.head

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns recorded so far."""
        with self.lock:
            self.settle()
            return tuple(self._intake.turns[: self.turn_count])

    def record_turn(self, *, finish: Finish | str, **fields: Unpack[TurnFields]) -> Turn:
        """Record one reply; it is durable when this returns. The fields are those of `TurnFields`."""
        with self.lock:
            journal, coded, entry = self._coded(finish=finish, **fields)
            ticket = journal.submit(entry, rollout=self._rollout.head.key, after=self._last_ticket())
            self._expect(coded, ticket)
            try:
                journal.wait(ticket)
            finally:
                # An interrupt may come when the turn is on the disk already; then it is part of the session.
                self.settle()
            return coded.turn

    def record_turn_async(self, *, finish: Finish | str, **fields: Unpack[TurnFields]) -> asyncio.Future[Turn]:
        """Record one reply from a coroutine; it is durable when the future is done.

        A bad turn is refused at once, by this call. What is given is copied and has its place in the session when
        this returns, whatever becomes of the future: a turn whose future is cancelled is recorded nevertheless.
        """
        with self.lock:
            journal, coded, entry = self._coded(finish=finish, **fields)
            ticket, future = journal.ticks.submit(
                coded.turn, entry, rollout=self._rollout.head.key, after=self._last_ticket()
            )
            self._expect(coded, ticket)
            return future

    def _coded(self, **fields: Any) -> tuple[Journal, CodedTurn, RecordedTurn]:
        self.settle()
        where = f"turn {self.id}.{len(self._intake.turns)}"
        journal = self._rollout.open_journal(where)
        if len(self._intake.turns) >= MAX_TURNS:
            raise RecordError(f"{where}: a session holds {MAX_TURNS} turns; open another one")
        coded = self._intake.code(**fields)
        return journal, coded, RecordedTurn(self._pk, coded, facts_json(coded.turn.facts, where))

    def _last_ticket(self) -> Ticket | None:
        return self._tickets[-1] if self._tickets else None

    def _expect(self, coded: CodedTurn, ticket: Ticket) -> None:
        """Take a turn as part of the session until its ticket says otherwise."""
        self._intake.accept(coded)
        self._tickets.append(ticket)

    @property
    def is_writing(self) -> bool:
        """Whether turns are on their way to the disk."""
        return bool(self._tickets) and not self._tickets[-1].done

    def settle(self) -> None:
        """Count the turns that are on the disk by now. One that was refused is taken back, and all after it."""
        while self._tickets and self._tickets[0].done:
            if self._tickets.popleft().stored:
                self._count(self._intake.turns[self.turn_count])
            else:
                # Those after it will be refused, if they are not yet: each ticket is bound to the one before.
                self._tickets.clear()
                self._intake.take_back(self.turn_count)

    def _count(self, turn: Turn) -> None:
        self.turn_count += 1
        self.sampled_tokens += len(turn.sampled_ids)
        for segment in turn.facts.segments:
            for version in (segment.first_version, segment.last_version):
                if version is not None:
                    self.versions[version] = None


class RolloutRecorder:
    """Records one try of a rollout: its sessions, then its finish.

    Example:

        with tape.rollout(task_id="t1", step=0, attempt=0) as rollout:
            session = rollout.session()
            rollout.finish(reward=1.0)

    A `with` block that is left by an exception, or without a finish, records the rollout as failed.
    """

    def __init__(
        self,
        tape: "Tape",
        journal: Journal,
        pk: int,
        head: RolloutHead,
        sessions: Sequence[tuple[int, SessionIntake]] = (),
    ) -> None:
        """`sessions` are those that earlier writers recorded, with the keys that they have in this journal."""
        self.head = head
        self.reward_check: Callable[[float], None] | None = None  # refuses a reward that contradicts what was said
        self._tape = tape
        self._journal = journal
        self._pk = pk
        self._lock = threading.RLock()
        self._sessions = [SessionRecorder(self, number, intake) for number, intake in sessions]
        self._ended: str | None = None

    @property
    def id(self) -> str:
        return self.head.id

    @property
    def group(self) -> str:
        return self.head.group

    @property
    def try_index(self) -> int:
        return self.head.try_index

    @property
    def is_open(self) -> bool:
        """Whether it takes more turns here: it has not ended, and nobody took it over."""
        try:
            self._journal.refuse_taken(self.head.key)
        except TakenOverError:
            return False
        return self._ended is None

    @property
    def sessions(self) -> tuple[SessionRecorder, ...]:
        """The sessions opened so far, those that earlier writers opened included."""
        return tuple(self._sessions)

    def session(
        self,
        *,
        tools: object = None,
        template_options: Mapping[str, Any] | None = None,
        stop_ids: object = None,
        tokenizer: str | None = None,
        model: str | None = None,
        renderer: str | None = None,
        fingerprint: str | None = None,
        logprob_kind: LogprobKind | str | None = None,
        tool_ids_matter: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> SessionRecorder:
        """Open a session; what is given here holds for its turns unless a turn says otherwise."""
        with self._lock:
            ordinal = len(self._sessions)
            own_id = session_id(self.id, self.try_index, ordinal)
            where = f"session {own_id}"
            journal = self.open_journal(where)
            head = SessionHead(
                id=own_id,
                ordinal=ordinal,
                tool_ids_matter=bool(tool_ids_matter),
                stop_ids=None if stop_ids is None else tuple(as_ids(stop_ids, f"{where}: stop_ids").tolist()),
                tokenizer=as_text(tokenizer, f"{where}: tokenizer"),
                extra=as_settings(extra, f"{where}: extra"),
            )
            intake = SessionIntake(
                head,
                tools=tools,
                template_options=template_options,
                model=as_text(model or self.head.model, f"{where}: model"),
                renderer=as_text(renderer, f"{where}: renderer"),
                fingerprint=as_text(fingerprint, f"{where}: fingerprint"),
                logprob_kind=logprob_kind,
            )
            pk = self._tape.next_session_pk(journal)
            journal.append(StartedSession(pk, self._pk, intake.head), rollout=self.head.key)
            session = SessionRecorder(self, pk, intake)
            self._sessions.append(session)
            return session

    def finish(
        self,
        *,
        reward: object = None,
        reward_terms: Mapping[str, object] | None = None,
        stop_reason: StopReason | str = StopReason.COMPLETED,
        reason: str | None = None,
    ) -> None:
        """End the rollout with an outcome. A reward may also come later, through `Tape.score`."""
        where = f"rollout {self.id}"
        score = score_data(reward, reward_terms, where)
        if score is not None and self.reward_check is not None:
            self.reward_check(score["reward"])
        self._end(
            Status.FINISHED, as_member(StopReason, stop_reason, where), as_text(reason, f"{where}: reason"), score
        )

    def fail(self, reason: str) -> None:
        """End the rollout as broken by the infrastructure: it has no reward, and averages leave it out."""
        if not isinstance(reason, str) or not reason:
            raise RecordError(f"rollout {self.id}: it failed for the reason {reason!r}; say why in words")
        self._end(Status.FAILED, None, reason, None)

    def _end(
        self, status: Status, stop_reason: StopReason | None, reason: str | None, score: dict[str, Any] | None
    ) -> None:
        # Asked before any lock is held: the tape takes its own, and then those of its rollouts.
        after_ns = 0 if score is None else self._tape.latest_ns(self.id)
        with contextlib.ExitStack() as held:
            held.enter_context(self._lock)
            for session in self._sessions:  # a turn that is being recorded counts, or comes too late
                held.enter_context(session.lock)
            journal = self.open_journal(f"rollout {self.id}")
            if any(session.is_writing for session in self._sessions):
                journal.flush()  # turns of coroutines that are on their way count, or are refused
            data: dict[str, Any] = {"status": status.value}
            if stop_reason is not None:
                data["stop_reason"] = stop_reason.value
            data["reason"] = as_text(reason, f"rollout {self.id}: reason")
            data["turns"] = list(self.turn_counts())
            data["sampled_tokens"] = sum(session.sampled_tokens for session in self._sessions)
            data["versions"] = list({version: None for session in self._sessions for version in session.versions})
            finish = self._tape.event(EventKind.FINISH, self.head.key, data=data)
            scored = None
            if score is not None:
                scored = self._tape.event(EventKind.SCORE, self.head.key, data=score, after_ns=after_ns)
            standing = packed(self.head, status, rewarded=scored is not None, row=self._pk)
            journal.append(EndedRollout(self._pk, standing, finish, scored), rollout=self.head.key)
            self._ended = status.value
            self._tape.forget(self)

    def statement(self, kind: EventKind, data: dict[str, Any]) -> LoggedEvent:
        """A statement about this rollout, encoded; `say` appends it."""
        return self._tape.event(kind, self.head.key, data=data)

    def say(self, statement: LoggedEvent, after: Ticket | None = None) -> Ticket:
        """Append a statement while the rollout is open: durable when this returns, on an event loop with the tick.

        If `after` was refused it is refused too; on an event loop only the ticket says so.
        """
        journal = self.open_journal("a statement")
        if running_loop() is not None:
            ticket, future = journal.ticks.submit(None, statement, rollout=self.head.key, after=after)
            # Nobody awaits it, and asyncio would complain of an error that nobody looked at; the ticket keeps it.
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
        else:
            ticket = journal.submit(statement, rollout=self.head.key, after=after)
            journal.wait(ticket)
        return ticket

    def earlier_events(self) -> tuple[Event, ...]:
        """What is on the tape about this rollout so far, by whomever."""
        return self._tape.run().rollout(self.id, self.try_index).events

    def turn_counts(self) -> tuple[int, ...]:
        """How many turns each session has so far."""
        for session in self._sessions:
            with session.lock:
                session.settle()
        return tuple(session.turn_count for session in self._sessions)

    def let_go(self) -> None:
        """Forget the sessions of a rollout that has ended: they hold it, and would wait for the garbage collector."""
        if self._ended is not None:
            self._sessions.clear()

    def open_journal(self, where: str) -> Journal:
        """The journal to write to, if this rollout may still be written to from here."""
        if self._ended is not None:
            raise ClosedError(f"{where}: rollout {self.id} (try {self.try_index}) is {self._ended} already")
        self._journal.refuse_taken(self.head.key)
        return self._tape.own_journal(self._journal, f"{where}: rollout {self.id}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._ended is not None:
            return
        if error is None:
            self.fail("left without a finish")
            return
        try:
            self.fail(_told(error))
        except (TapeWriteError, ClosedError) as unwritten:
            error.add_note(f"and its rollout could not be recorded as failed: {unwritten}")


def _told(error: BaseException) -> str:
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception as odd:  # noqa: BLE001 - a user's __str__ may raise anything, and must not hide the user's error
        return f"{kind}, whose text cannot be had ({type(odd).__name__})"
    return f"{kind}: {text}" if text else kind


def score_data(reward: object, terms: Mapping[str, object] | None, where: str) -> dict[str, Any] | None:
    """The data of a score; None: no reward was given."""
    if terms is not None and not isinstance(terms, Mapping):
        raise RecordError(f"{where}: reward terms are a {type(terms).__name__}; give a mapping from name to number")
    if reward is None:
        if terms:
            raise RecordError(f"{where}: reward terms {sorted(map(str, terms))} but no reward; give the reward itself")
        return None
    numbers = {str(name): as_float(term, f"{where}: reward term {name!r}") for name, term in (terms or {}).items()}
    return {"reward": as_float(reward, f"{where}: reward"), "terms": numbers}
