"""Recording one session: its turns, each durable when the call returns, or when its future is done."""

import asyncio
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Unpack

from rolltape.errors import NoSuchRollout, RecordError
from rolltape.records.rollout import EventKind, SessionHead
from rolltape.records.turn import Delivery, Finish, Turn
from rolltape.tape.journal.entries import MAX_TURNS, CodedTurn, LoggedEvent, RecordedTurn, encode_event, facts_json
from rolltape.tape.journal.writing import Journal, OpenRollout, Ticket
from rolltape.tape.recording.fields import TurnFields, as_member
from rolltape.tape.recording.intake import SessionIntake

if TYPE_CHECKING:
    from rolltape.tape.recording.writer import TapeWriter


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

    def __init__(self, writer: "TapeWriter", rollout: OpenRollout, key: int, intake: SessionIntake) -> None:
        """`key` is the session's key in the journal. Turns that the intake has are on the tape already."""
        self._writer = writer
        self._rollout = rollout
        self._key = key
        self._intake = intake  # its turns from `turn_count` on may still be refused
        self._tickets: deque[tuple[int, Ticket]] = deque()  # of those turns, with their sequence numbers
        self.lock = threading.RLock()
        self.turn_count = len(intake.turns)

    @property
    def id(self) -> str:
        """The session's id."""
        return self._intake.head.id

    @property
    def head(self) -> SessionHead:
        """What the session was opened with."""
        return self._intake.head

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns recorded so far, also those that an earlier process recorded."""
        with self.lock:
            self.settle()
            return tuple(self._intake.turns[: self.turn_count])

    def now(self) -> float:
        """Seconds since the epoch. Unlike the clock of the system it never goes back, so turns keep their order."""
        return self._rollout.journal.now_ns() / 1e9

    def record_turn(self, *, finish: Finish | str, **fields: Unpack[TurnFields]) -> Turn:
        """Record one reply with the prompt it was sampled from. It is durable when this returns.

        Give the prompt whole, or `after` with what is new. Both are stored as what is new. Ids, logprobs and side
        arrays may be lists, numpy arrays or torch tensors. Everything is copied. Bad input raises a RecordError, and
        the session stays as it was.

        Args:
            finish: How the reply ended: "stop" (a stop token, its last id), "stop_string", "length", "abort", "error".

            prompt_messages: The whole conversation before the reply, as chat messages.
            prompt_ids: The whole prompt as token ids, exactly as the engine was conditioned on them.
            after: Instead of a whole prompt: an earlier turn of this session, or its id. The prompt begins with the
                ids of that turn, prompt and reply.
            new_messages: With `after`: the messages that follow that turn.
            new_prompt_ids: With `after`: the ids that follow those of that turn.
            message_starts: Where each message of `prompt_messages` begins in `prompt_ids`, or each of `new_messages` in
                `new_prompt_ids`.

            sampled_ids: The ids that the engine sampled, the stop token included.
            logprobs: The engine's logprob of each sampled id; None for one that it did not give.
            weight_version: The weights that sampled the reply, as a text or a number.
            segments: Instead of these three, for a reply during which the weights were updated: a list of mappings
                with `sampled_ids`, `logprobs` and `weight_version`. A version that lies between two is a pair.
            reply: The reply as a chat message with the role "assistant".
            side_arrays: Further values per token, by name. An array has a row for each sampled id. A mapping with
                `values`, and `start` or `counts`, covers other tokens, or has several values for each.

            tools: Tools that the prompt declares, if they are not the session's.
            template_options: Options of the chat template, if they are not the session's.
            sampling: The sampling parameters as applied: {"temperature": 0.7, "top_p": 0.95}.
            sampling_asked: The parameters that the client asked for, if others were applied.
            logprob_kind: What the logprobs are of: "raw", "after_temperature" or "after_truncation".
            model: The model that replied, if it is not the session's.
            renderer: The renderer that made the prompt, if it is not the session's.
            fingerprint: A fingerprint of tokenizer and chat template, if it is not the session's.

            reward: A reward for this turn alone.
            delivery: Whether the client got the reply: "delivered" (the default), "undelivered" or "unknown".
            auxiliary: Why the call is no part of the task, such as "a title". Such a turn does not train.
            token_faithful: False for an engine that returns text and no ids. Such a turn does not train.
            flags: What is odd about the turn, as values of TurnFlag.
            error: What went wrong, for a turn that ended by "error" or "abort".
            started_at: When the reply was requested, in seconds since the epoch.
            ended_at: When the reply ended; now, if it is left out.
            extra: Further JSON to keep with the turn.

        Returns:
            The turn. Give the turn, or its `id`, as `after` of the next one.

        Example:

            first = session.record_turn(
                prompt_messages=[{"role": "user", "content": "What is 17 * 23?"}],
                prompt_ids=[1, 17, 42, 23, 2],
                sampled_ids=[60, 61, 3],
                logprobs=[-0.25, -0.5, -0.125],
                reply={"role": "assistant", "content": "Let me see."},
                finish="stop",
                weight_version="7",
                sampling={"temperature": 0.7},
            )
            session.record_turn(
                after=first,
                new_messages=[{"role": "user", "content": "Well?"}],
                new_prompt_ids=[50, 2],
                sampled_ids=[70, 3],
                logprobs=[-0.1, None],
                reply={"role": "assistant", "content": "391"},
                finish="stop",
                weight_version="7",
            )
        """
        with self.lock:
            journal, coded, ticket = self._coded(finish=finish, **fields)
            try:
                self._expect(coded, ticket)
                journal.store(ticket)
            except BaseException as interrupt:
                journal.withdraw(ticket, interrupt)
                raise
            finally:
                # If an interrupt comes when the turn is on the disk already, the turn is part of the session.
                self.settle()
            return coded.turn

    def record_turn_async(self, *, finish: Finish | str, **fields: Unpack[TurnFields]) -> asyncio.Future[Turn]:
        """As `record_turn`, from a coroutine: the turn is durable when the future is done.

        This call itself refuses a bad turn. When it returns, the turn is copied and has its place in the session.
        Cancelling the future does not take the turn back.

        Example:

            turn = await session.record_turn_async(after=first, new_messages=[…], new_prompt_ids=[…], …)
        """
        with self.lock:
            journal, coded, ticket = self._coded(finish=finish, **fields)
            try:
                self._expect(coded, ticket)
                return journal.submit_async(ticket, coded.turn)
            except BaseException as interrupt:
                journal.withdraw(ticket, interrupt)
                self.settle()
                raise

    def mark_delivered_async(self, turn: Turn, delivery: Delivery | str = Delivery.DELIVERED) -> asyncio.Future[None]:
        """As `Tape.mark_delivered_async`, for a turn of this session."""
        if turn.session != self.id:
            raise NoSuchRollout(f"turn {turn.id}: not a turn of session {self.id}; give one that was recorded here")
        if self._rollout.ended is not None:
            return self._writer.submit_delivery(turn.id, delivery)
        event = self.encode_delivery(turn.id, delivery)
        self._rollout.journal.check_open(f"turn {turn.id}: its rollout")
        return self._rollout.journal.submit_async(Ticket([event], self._rollout.key), None)

    def encode_delivery(self, turn_id: str, delivery: Delivery | str) -> LoggedEvent:
        """The event that records whether the reply of a turn arrived, while the rollout is open.

        No other process records its deliveries in that time, so this event need not sort after others.
        """
        data = {"delivery": as_member(Delivery, delivery, f"turn {turn_id}").value}
        return encode_event(EventKind.DELIVERY, self._rollout.key, data, turn=turn_id)

    def _coded(self, **fields: Any) -> tuple[Journal, CodedTurn, Ticket]:
        self.settle()
        where = f"turn {self.id}.{len(self._intake.turns)}"
        journal = self._rollout.check(where)
        if len(self._intake.turns) >= MAX_TURNS:
            raise RecordError(f"{where}: a session holds {MAX_TURNS} turns; open another one")
        if fields.get("ended_at") is None:
            fields["ended_at"] = self.now()
        coded = self._intake.code(**fields)
        entry = RecordedTurn(self._key, coded, facts_json(coded.turn.facts, where))
        before = self._tickets[-1][1] if self._tickets else None
        return journal, coded, Ticket([entry], self._rollout.key, before)

    def _expect(self, coded: CodedTurn, ticket: Ticket) -> None:
        """Treat a turn as part of the session until its ticket is refused."""
        self._tickets.append((coded.turn.sequence, ticket))
        self._intake.accept(coded)

    @property
    def is_writing(self) -> bool:
        """Whether turns are on their way to the disk."""
        return bool(self._tickets) and not self._tickets[-1][1].done

    def settle(self) -> None:
        """Count the turns that are on the disk by now. If a turn was refused, it and all later turns are taken back."""
        while self._tickets and self._tickets[0][1].done:
            sequence, ticket = self._tickets[0]
            if ticket.stored:
                self.turn_count = sequence + 1
                self._tickets.popleft()
            else:
                # Later tickets are refused too: each one builds on the one before.
                self._intake.take_back(sequence)
                self._tickets.clear()
