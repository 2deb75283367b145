"""Recording one rollout: its sessions, the events about it, and its end."""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rolltape.errors import ClosedError, RecordError, TakenOverError, TapeWriteError
from rolltape.records.ids import session_id
from rolltape.records.jsonable import as_float
from rolltape.records.rollout import Event, EventKind, RolloutHead, SessionHead, Status, StopReason
from rolltape.records.turn import LogprobKind, weight_versions
from rolltape.tape.journal.entries import EndedRollout, LoggedEvent, StartedSession, encode_event
from rolltape.tape.journal.writing import Journal, OpenRollout, Ticket, running_loop
from rolltape.tape.recording.fields import as_count, as_ids, as_member, as_settings, as_text
from rolltape.tape.recording.intake import SessionIntake
from rolltape.tape.recording.session import SessionRecorder
from rolltape.tape.run import read

if TYPE_CHECKING:
    from rolltape.tape.recording.writer import TapeWriter


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
        writer: "TapeWriter",
        journal: Journal,
        row: int,
        head: RolloutHead,
        sessions: Sequence[tuple[int, SessionIntake]] = (),
    ) -> None:
        """`sessions` are those that earlier writers recorded, with the keys that they have in this journal."""
        self.head = head
        self.reward_check: Callable[[float], None] | None = None  # refuses a reward that contradicts earlier ones
        self._writer = writer
        self._open = OpenRollout(journal, row, head.key)
        self._first_event = journal.next_event
        self._lock = threading.RLock()
        self._sessions = [SessionRecorder(writer, self._open, key, intake) for key, intake in sessions]

    @property
    def id(self) -> str:
        """The rollout's id: known before anything happens, the same for all tries."""
        return self.head.id

    @property
    def group(self) -> str:
        """The id that all attempts at the task at this step share."""
        return self.head.group

    @property
    def try_index(self) -> int:
        """The number of this try."""
        return self.head.try_index

    @property
    def is_open(self) -> bool:
        """Whether it accepts more turns here: it has not ended, and no other writer took it over."""
        try:
            self._open.journal.refuse_taken(self._open.key)
        except TakenOverError:
            return False
        return self._open.ended is None

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
        vocabulary: int | None = None,
        tokenizer: str | None = None,
        model: str | None = None,
        renderer: str | None = None,
        fingerprint: str | None = None,
        logprob_kind: LogprobKind | str | None = None,
        tool_ids_matter: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> SessionRecorder:
        """Open a session. What is given here applies to its turns, unless a turn is recorded with its own.

        Args:
            tools: The tools that prompts declare.
            template_options: Options of the chat template.
            stop_ids: The ids that end a reply. A reply that ends by "stop" on another id is then flagged, and a
                reply that continues after such an id does not train.
            vocabulary: One more than the largest id of the tokenizer. A reply with an id beyond it does not train.
            tokenizer: Where the text of the ids can be found: a path, which may lie in the run, or a name.
            model: The model that replies, if it is not the rollout's.
            renderer: The renderer that makes prompts.
            fingerprint: A fingerprint of tokenizer and chat template.
            logprob_kind: What logprobs are of: "raw", "after_temperature" or "after_truncation".
            tool_ids_matter: The model samples and renders tool-call ids, so they count when messages are compared.
            extra: Further JSON to keep with the session.
        """
        with self._lock:
            ordinal = len(self._sessions)
            own_id = session_id(self.id, self.try_index, ordinal)
            where = f"session {own_id}"
            journal = self._open.check(where)
            head = SessionHead(
                id=own_id,
                ordinal=ordinal,
                tool_ids_matter=bool(tool_ids_matter),
                stop_ids=None if stop_ids is None else tuple(as_ids(stop_ids, f"{where}: stop_ids").tolist()),
                vocabulary=None if vocabulary is None else as_count(vocabulary, f"{where}: vocabulary"),
                flags_faults=True,
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
            key = journal.new_session()
            session = SessionRecorder(self._writer, self._open, key, intake)

            def stored() -> None:
                self._sessions[ordinal:] = [session]

            started = StartedSession(key, self._open.row, intake.head)
            journal.append(started, rollout=self._open.key, stored=stored)
            return session

    def finish(
        self,
        *,
        reward: object = None,
        reward_terms: Mapping[str, object] | None = None,
        stop_reason: StopReason | str = StopReason.COMPLETED,
        reason: str | None = None,
    ) -> None:
        """End the rollout with an outcome. A reward may also come later, through `Tape.score`.

        Args:
            reward: The reward; None if none is known yet.
            reward_terms: What the reward is made of, by name.
            stop_reason: Why it ended, as a value of StopReason: "completed", "max_turns", "timeout", …
            reason: The same in words.
        """
        where = f"rollout {self.id}"
        score = score_data(reward, reward_terms, where)
        if score is not None and self.reward_check is not None:
            self.reward_check(score["reward"])
        self._end(
            Status.FINISHED, as_member(StopReason, stop_reason, where), as_text(reason, f"{where}: reason"), score
        )

    def fail(self, reason: str) -> None:
        """End the rollout as failed because of the infrastructure: it has no reward, and averages leave it out."""
        if not isinstance(reason, str) or not reason:
            raise RecordError(f"rollout {self.id}: it failed for the reason {reason!r}; say why in words")
        self._end(Status.FAILED, None, reason, None)

    def _end(
        self, status: Status, stop_reason: StopReason | None, reason: str | None, score: dict[str, Any] | None
    ) -> None:
        # Called before any lock is held: the tape takes its own lock, and then those of its rollouts.
        after_ns = 0 if score is None else self._writer.latest_ns(self.id)
        with contextlib.ExitStack() as held:
            held.enter_context(self._lock)
            for session in self._sessions:  # a turn that is being recorded is counted, or is refused
                held.enter_context(session.lock)
            journal = self._open.check(f"rollout {self.id}")
            if any(session.is_writing for session in self._sessions):
                journal.flush()  # turns that coroutines have submitted are counted, or are refused
            data: dict[str, Any] = {"status": status.value}
            if stop_reason is not None:
                data["stop_reason"] = stop_reason.value
            data["reason"] = as_text(reason, f"rollout {self.id}: reason")
            data["turns"] = list(self.turn_counts())
            turns = [turn for session in self._sessions for turn in session.turns]
            data["sampled_tokens"] = sum(len(turn.sampled_ids) for turn in turns)
            data["versions"] = weight_versions(turns)
            finish = self.encode_event(EventKind.FINISH, data)
            scored = None
            if score is not None:
                scored = encode_event(EventKind.SCORE, self._open.key, score, after_ns=after_ns)

            def stored() -> None:
                self._open.ended = status.value

            ended = EndedRollout(self._open.row, finish, scored)
            journal.append(ended, rollout=self._open.key, stored=stored)
            self._writer.ended(self.head, self._open.row, self._first_event)

    def encode_event(self, kind: EventKind, data: dict[str, Any]) -> LoggedEvent:
        """An event about this rollout, for `append_event`."""
        return encode_event(kind, self._open.key, data)

    def append_event(self, event: LoggedEvent, after: Ticket | None = None) -> Ticket:
        """Append an event while the rollout is open. It is durable when this returns, on an event loop after the tick.

        It is refused if `after` was refused. On an event loop, only the ticket shows this.
        """
        journal, ticket = self._open.check("an event"), Ticket([event], self._open.key, after)
        if running_loop() is not None:
            future = journal.submit_async(ticket, None)
            # No caller awaits the future, and asyncio would warn about an error that was never read. The ticket has it.
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
        else:
            journal.store(ticket)
        return ticket

    def earlier_events(self) -> tuple[Event, ...]:
        """All events about this rollout that are on the tape, also those of earlier writers."""
        return read(self._writer.directory.path).rollout(self.id, self.try_index).events

    def turn_counts(self) -> tuple[int, ...]:
        """How many turns each session has so far."""
        for session in self._sessions:
            with session.lock:
                session.settle()
        return tuple(session.turn_count for session in self._sessions)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._open.ended is not None:
            return
        if error is None:
            self.fail("left without a finish")
            return
        try:
            self.fail(_describe(error))
        except (TapeWriteError, ClosedError) as unwritten:
            error.add_note(f"and its rollout could not be recorded as failed: {unwritten}")


def _describe(error: BaseException) -> str:
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception as odd:  # noqa: BLE001 - a user's __str__ may raise anything, and must not hide the user's error
        return f"{kind}, whose text cannot be read ({type(odd).__name__})"
    return f"{kind}: {text}" if text else kind


def score_data(reward: object, terms: Mapping[str, object] | None, where: str) -> dict[str, Any] | None:
    """The data of a score, or None if no reward was given."""
    if terms is not None and not isinstance(terms, Mapping):
        raise RecordError(f"{where}: reward terms are a {type(terms).__name__}; give a mapping from name to number")
    if reward is None:
        if terms:
            raise RecordError(f"{where}: reward terms {sorted(map(str, terms))} but no reward; give the reward itself")
        return None
    numbers = {str(name): as_float(term, f"{where}: reward term {name!r}") for name, term in (terms or {}).items()}
    return {"reward": as_float(reward, f"{where}: reward"), "terms": numbers}
