"""What an environment calls, step by step. Whatever it hands over, its rollout goes on."""

import logging
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rolltape.errors import RecordError, TapeWriteError
from rolltape.records.rollout import Event, EventKind, StopReason
from rolltape.records.turn import Turn
from rolltape.tape.journal.entries import LoggedEvent
from rolltape.tape.journal.writing import Ticket
from rolltape.tape.recording.recorder import RolloutRecorder
from rolltape.tape.stored import decoded_event
from rolltape.traces.capture import Capture, captures
from rolltape.traces.conversations import Conversations, Placed
from rolltape.traces.rewards import agree, summed
from rolltape.traces.values import Fields, checked, naming, salvaged

log = logging.getLogger("rolltape.traces")

Object = Mapping[str, Any] | None
_traced: "weakref.WeakSet[RolloutRecorder]" = weakref.WeakSet()


class TraceWriter:
    """Records the trace of one open rollout. Threads and coroutines may share it; its steps are put in one order.

    What is given is copied before a call returns. What cannot be kept is left out, and the trace says why; only a
    rollout that has ended takes no more. Off an event loop a step is durable when `step` returns, on one with the tick.
    """

    def __init__(
        self,
        rollout: RolloutRecorder,
        capture: Capture | str = Capture.ALL,
        *,
        fraction: float | None = None,
        keep: bool = False,
    ) -> None:
        """With `keep` what is recorded is also had from `said`, without reading the tape."""
        self.captures = captures(rollout.id, capture, fraction)
        if rollout in _traced:
            raise RecordError(f"rollout {rollout.id} has a TraceWriter already; its steps are counted in one place")
        _traced.add(rollout)
        self._rollout = rollout
        self._lock = threading.RLock()
        self._steps = 0
        self._step_rewards: list[float] = []
        self._final_rewards: list[float] = []  # at most one
        self._conversations = Conversations()
        self._tickets: deque[Ticket] = deque()
        self._lost = 0
        self._told: set[str] = set()
        self._kept: list[LoggedEvent] | None = [] if keep else None

    @property
    def said(self) -> list[Event]:
        """What was recorded so far, if it was to be kept."""
        return [decoded_event("", number, one.body).event for number, one in enumerate(self._kept or ())]

    @property
    def total_reward(self) -> float | None:
        """The steps' rewards and the final one so far; None: there were none."""
        rewards = self._rewards()
        return summed(rewards) if rewards else None

    @property
    def lost(self) -> int:
        """How many steps could not be written: the disk was full, say."""
        with self._lock:
            self._settle()
            return self._lost

    def step(
        self,
        *,
        turn: Turn | str | Sequence[Turn | str] | None = None,
        prompt: Sequence[Mapping[str, Any]] | Object = None,
        policy_response: Object = None,
        reward: object = None,
        done: object = None,
        stop_reason: StopReason | str | None = None,
        reward_data: Object = None,
        env_state: Object = None,
        extra: Object = None,
        metrics: Object = None,
        logs: Object = None,
        prompt_tokens: int | None = None,
        sampled_tokens: int | None = None,
    ) -> int:
        """Record a step; its number. With a turn its messages are that turn's, and not stored again.

        Without one, give the prompt as whole messages: only what is new in them is stored.
        """
        with self._lock:
            index = self._steps
            self._steps += 1
            if not self.captures:
                self._step_rewards += _number(reward)
                return index
            where = f"rollout {self._rollout.id}, step {index}"
            self._settle()
            given = {
                "turns": turn,
                "prompt": prompt,
                "policy_response": policy_response,
                "reward": reward,
                "done": done,
                "stop_reason": stop_reason,
                "reward_data": reward_data,
                "env_state": env_state,
                "extra": extra,
                "metrics": metrics,
                "logs": logs,
                "prompt_tokens": prompt_tokens,
                "sampled_tokens": sampled_tokens,
            }
            fields, unrecorded = checked(given, where)
            self._step_rewards += _number(reward)
            self._refuse_foreign_turns(fields, unrecorded, where)
            if fields.get("turns"):
                _leave_messages_to_the_turn(fields)
            self._record(index, fields, unrecorded, self._placed(fields, unrecorded, where), where)
            return index

    def final(
        self,
        *,
        reward: object = None,
        total: object = None,
        reward_data: Object = None,
        env_state: Object = None,
        extra: Object = None,
        metrics: Object = None,
        logs: Object = None,
    ) -> float | None:
        """Record what is said of the whole rollout at its end, and give its total reward, to finish it with.

        A `total` that is given, and the reward that the rollout is finished with, must agree with it.
        """
        with self._lock:
            where = f"rollout {self._rollout.id}, final"
            self._settle()
            self._final_rewards = _number(reward) or self._final_rewards
            for number in _number(total):
                self._check_total(number)
            self._rollout.reward_check = self._check_total
            if self.captures:
                given = {
                    "reward": reward,
                    "reward_data": reward_data,
                    "env_state": env_state,
                    "extra": extra,
                    "metrics": metrics,
                    "logs": logs,
                }
                self._record(None, *checked(given, where), None, where)
            return self.total_reward

    def _rewards(self) -> list[float]:
        with self._lock:
            return self._step_rewards + self._final_rewards

    def _check_total(self, total: float) -> None:
        rewards = self._rewards()
        if rewards and not agree(total, rewards):
            raise RecordError(
                f"rollout {self._rollout.id}: its reward is {total!r}, but those of its steps and the final one sum to "
                f"{summed(rewards)!r}; finish it with what `final` gives"
            )

    def _refuse_foreign_turns(self, fields: Fields, unrecorded: dict[str, str], where: str) -> None:
        own = f"{self._rollout.id}.{self._rollout.try_index}."
        strange = [turn for turn in fields.get("turns", ()) if not turn.startswith(own)]
        if strange:
            unrecorded["turns"] = f"{where}: turn {strange[0]} is of another rollout or try; name turns of this one"
            del fields["turns"]

    def _placed(self, fields: Fields, unrecorded: dict[str, str], where: str) -> Placed | None:
        """Put what is new in the prompt in the place of all its messages."""
        if not isinstance(fields.get("prompt"), list):
            return None
        try:
            with naming(f"{where}: prompt"):
                placed = self._conversations.place(fields["prompt"], f"{where}: prompt")
        except RecordError as error:
            unrecorded["prompt"] = str(error)
            del fields["prompt"]
            return None
        fields["prompt"] = placed.new
        if placed.kept_messages:
            fields |= {"messages_from": placed.messages_from, "kept_messages": placed.kept_messages}
        return placed

    def _record(
        self, step: int | None, fields: Fields, unrecorded: dict[str, str], placed: Placed | None, where: str
    ) -> None:
        try:
            with naming(where):
                event = self._event(step, fields, unrecorded)
        except RecordError:
            fields, more = salvaged(fields, where)
            unrecorded |= more
            if "prompt" not in fields:
                fields.pop("messages_from", None)
                fields.pop("kept_messages", None)
                placed = None
            event = self._event(step, fields, unrecorded)
        for name in unrecorded.keys() - self._told:
            log.warning("%s; the trace goes on without it", unrecorded[name])
            self._told.add(name)
        try:
            self._tickets.append(self._rollout.say(event, after=self._tickets[-1] if self._tickets else None))
        except TapeWriteError as error:
            self._lose(1, error)
            return
        if self._kept is not None:
            self._kept.append(event)
        if placed is not None and step is not None:
            self._conversations.add(step, placed, fields.get("policy_response"), where)

    def _event(self, step: int | None, fields: Fields, unrecorded: dict[str, str]) -> LoggedEvent:
        data = {"step": step, **fields, **({"unrecorded": unrecorded} if unrecorded else {})}
        return self._rollout.statement(EventKind.TRACE, data)

    def _settle(self) -> None:
        """Forget the tickets of what is on the disk. If one was refused, so were all that build on it."""
        while self._tickets and self._tickets[0].done:
            ticket = self._tickets.popleft()
            if not ticket.stored:
                self._lose(1 + len(self._tickets), ticket.error)
                self._tickets.clear()

    def _lose(self, steps: int, error: BaseException | None) -> None:
        self._lost += steps
        self._conversations.forget()
        log.warning("rollout %s: steps of its trace could not be written (%s): %s", self._rollout.id, steps, error)


def _leave_messages_to_the_turn(fields: Fields) -> None:
    if isinstance(fields.get("prompt"), list):
        del fields["prompt"]
    if "role" in fields.get("policy_response", ()):
        del fields["policy_response"]


def _number(value: object) -> list[float]:
    """A reward, if it is one."""
    if type(value) is float:
        return [value]
    return [*checked({"reward": value}, "")[0].values()]
