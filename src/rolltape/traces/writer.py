"""`TraceWriter`, which an environment calls step by step, and `amend`, for later additions."""

import enum
import logging
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from rolltape.errors import RecordError, TapeWriteError
from rolltape.records.ids import digest_of
from rolltape.records.jsonable import shown
from rolltape.records.rollout import Event, EventKind, StopReason
from rolltape.records.trace import OBJECTS, Fields, TraceObjects
from rolltape.records.turn import Turn
from rolltape.tape.journal.entries import LoggedEvent
from rolltape.tape.journal.writing import Ticket
from rolltape.tape.recording.fields import as_count
from rolltape.tape.recording.rollout import RolloutRecorder
from rolltape.tape.recording.tape import Tape
from rolltape.tape.stored import decoded_event
from rolltape.traces.build import agree, summed
from rolltape.traces.values import (
    Conversations,
    PlacedPrompt,
    check_fields,
    check_names,
    reading_errors,
    salvage_fields,
)

log = logging.getLogger("rolltape.traces")

_traced: "weakref.WeakSet[RolloutRecorder]" = weakref.WeakSet()


class Capture(enum.StrEnum):
    """Which rollouts are traced."""

    OFF = "off"
    SAMPLED = "sampled"  # a fraction, chosen by their ids
    ALL = "all"


def is_captured(rollout: str, capture: Capture | str, fraction: float | None) -> bool:
    """Whether a rollout is traced. With `SAMPLED` its id decides, so it is the same on every machine and every try."""
    if capture not in list(Capture):
        known = ", ".join(Capture)
        raise RecordError(f"rollout {rollout}: capture is {shown(capture)}; give one of {known}")
    if capture != Capture.SAMPLED:
        if fraction is not None:
            raise RecordError(f"rollout {rollout}: fraction {shown(fraction)} needs capture 'sampled'; leave it out")
        return capture == Capture.ALL
    if fraction is None or not 0 <= fraction <= 1:
        raise RecordError(
            f"rollout {rollout}: capture 'sampled' with fraction {shown(fraction)}; give one between 0 and 1"
        )
    return int.from_bytes(digest_of("trace", rollout)[:8]) < fraction * 2**64


class TraceWriter:
    """Records the trace of one open rollout, step by step. Threads and coroutines may share it.

    Example:

        trace = rolltape.TraceWriter(rollout)
        trace.step(turn=turn, reward=0.5, env_state={"score": 3})
        rollout.finish(reward=trace.final(reward=1.0))

    All arguments are copied before a call returns. What cannot be stored is left out, and the trace states why. Only a
    rollout that has ended refuses steps. A step is durable when `step` returns, or on an event loop after the tick.
    """

    def __init__(
        self,
        rollout: RolloutRecorder,
        capture: Capture | str = Capture.ALL,
        *,
        fraction: float | None = None,
        keep: bool = False,
    ) -> None:
        """With `keep`, `events` holds what was recorded, without reading the tape."""
        self.captures = is_captured(rollout.id, capture, fraction)
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
        self._warned: set[str] = set()  # fields
        self._kept: list[LoggedEvent] | None = [] if keep else None
        if rollout.head.epoch:
            self._count_earlier()

    def _count_earlier(self) -> None:
        """Count the steps and rewards that an earlier writer of the rollout recorded."""
        if not self.captures:
            raise RecordError(
                f"rollout {self._rollout.id}: its steps are not captured, so the rewards of those before it was taken "
                "over are not known; start another with new_try=True"
            )
        steps = [event.data for event in self._rollout.earlier_events() if event.kind == EventKind.TRACE]
        rewards = {step.get("step"): step["reward"] for step in steps if step.get("reward") is not None}
        self._steps = max((step["step"] + 1 for step in steps if step.get("step") is not None), default=0)
        self._step_rewards = [rewards[step] for step in range(self._steps) if step in rewards]
        self._final_rewards = [rewards[None]] if None in rewards else []

    @property
    def events(self) -> list[Event]:
        """What was recorded so far, in order and without times, if the writer was made with `keep`."""
        return [decoded_event("", number, one.body(number)).event for number, one in enumerate(self._kept or ())]

    @property
    def total_reward(self) -> float | None:
        """The sum of the steps' rewards and the final reward so far, or None if there were none."""
        rewards = self._rewards()
        return summed(rewards) if rewards else None

    @property
    def lost(self) -> int:
        """How many steps could not be written, for example because the disk was full."""
        with self._lock:
            self._settle()
            return self._lost

    def step(
        self,
        *,
        turn: Turn | str | Sequence[Turn | str] | None = None,
        prompt: Sequence[Mapping[str, Any]] | Mapping[str, Any] | None = None,
        policy_response: Mapping[str, Any] | None = None,
        reward: object = None,
        done: object = None,
        stop_reason: StopReason | str | None = None,
        prompt_tokens: int | None = None,
        sampled_tokens: int | None = None,
        **objects: Unpack[TraceObjects],
    ) -> int:
        """Record a step and return its number. All fields may be left out.

        - `turn`: the turn or turns of the step. The step has their messages, which are not stored again.
        - `prompt`, `policy_response`: without a turn, the whole prompt as messages (only what is new in it is stored)
          and the reply; or any JSON objects.
        - `reward`: a number; `done`: whether the environment ended here; `stop_reason`: why.
        - `prompt_tokens`, `sampled_tokens`: lengths, if no turn has them.
        - `reward_data`, `env_state`, `extra`, `metrics`, `logs`: JSON objects.
        """
        check_names(objects)
        with self._lock:
            index = self._steps
            self._steps += 1
            self._step_rewards += _as_rewards(reward)
            if not self.captures:
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
                "prompt_tokens": prompt_tokens,
                "sampled_tokens": sampled_tokens,
                **objects,
            }
            fields, unrecorded = check_fields(given, where)
            self._refuse_foreign_turns(fields, unrecorded, where)
            if fields.get("turns"):
                _leave_messages_to_the_turn(fields)
            self._record(index, fields, unrecorded, self._place_prompt(fields, unrecorded, where), where)
            return index

    def final(self, *, reward: object = None, total: object = None, **objects: Unpack[TraceObjects]) -> float | None:
        """Record data about the whole rollout at its end, and return its total reward, to finish it with.

        A given `total`, and the reward that the rollout is finished with, must agree with it. `objects` are
        `reward_data`, `env_state`, `extra`, `metrics` and `logs`, as for a step.
        """
        check_names(objects)
        with self._lock:
            where = f"rollout {self._rollout.id}, final"
            self._settle()
            self._final_rewards = _as_rewards(reward) or self._final_rewards
            for number in _as_rewards(total):
                self._check_total(number)
            self._rollout.reward_check = self._check_total
            if self.captures:
                self._record(None, *check_fields({"reward": reward, **objects}, where), None, where)
            return self.total_reward

    def _rewards(self) -> list[float]:
        with self._lock:
            return self._step_rewards + self._final_rewards

    def _check_total(self, total: float) -> None:
        rewards = self._rewards()
        if rewards and not agree(total, rewards):
            raise RecordError(
                f"rollout {self._rollout.id}: its reward is {total!r}, but those of its steps and the final one sum to "
                f"{summed(rewards)!r}; finish it with what `final` returns"
            )

    def _refuse_foreign_turns(self, fields: Fields, unrecorded: dict[str, str], where: str) -> None:
        own = f"{self._rollout.id}.{self._rollout.try_index}."
        foreign = [turn for turn in fields.get("turns", ()) if not turn.startswith(own)]
        if foreign:
            unrecorded["turns"] = f"{where}: turn {foreign[0]} is of another rollout or try; name turns of this one"
            del fields["turns"]

    def _place_prompt(self, fields: Fields, unrecorded: dict[str, str], where: str) -> PlacedPrompt | None:
        """Replace the messages of the prompt by the new ones among them."""
        if not isinstance(fields.get("prompt"), list):
            return None
        try:
            with reading_errors(f"{where}: prompt"):
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
        self, step: int | None, fields: Fields, unrecorded: dict[str, str], placed: PlacedPrompt | None, where: str
    ) -> None:
        try:
            with reading_errors(where):
                event = self._event(step, fields, unrecorded)
        except RecordError:
            fields, more = salvage_fields(fields, where)
            unrecorded |= more
            if "prompt" not in fields:
                fields.pop("messages_from", None)
                fields.pop("kept_messages", None)
                placed = None
            event = self._event(step, fields, unrecorded)
        for name in unrecorded.keys() - self._warned:
            log.warning("%s; the trace continues without it", unrecorded[name])
            self._warned.add(name)
        try:
            self._tickets.append(self._rollout.append_event(event, after=self._tickets[-1] if self._tickets else None))
        except TapeWriteError as error:
            self._lose(1, error)
            return
        if self._kept is not None:
            self._kept.append(event)
        if placed is not None and step is not None:
            self._conversations.add(step, placed, fields.get("policy_response"), where)

    def _event(self, step: int | None, fields: Fields, unrecorded: dict[str, str]) -> LoggedEvent:
        data = {"step": step, **fields, **({"unrecorded": unrecorded} if unrecorded else {})}
        return self._rollout.encode_event(EventKind.TRACE, data)

    def _settle(self) -> None:
        """Drop the tickets that are on disk. If one was refused, all that build on it are refused too."""
        while self._tickets and self._tickets[0].done:
            ticket = self._tickets.popleft()
            if not ticket.stored:
                self._lose(1 + len(self._tickets), ticket.error)
                self._tickets.clear()

    def _lose(self, steps: int, error: BaseException | None) -> None:
        self._lost += steps
        self._conversations.forget()
        log.warning("rollout %s: steps of its trace could not be written (%s): %s", self._rollout.id, steps, error)


def amend(
    tape: Tape,
    rollout_id: str,
    *,
    step: int | None = None,
    by: str | None = None,
    try_index: int | None = None,
    **objects: Unpack[TraceObjects],
) -> None:
    """Add data that is known only later, such as grades, to a rollout's trace. Each object replaces its earlier value.

        amend(tape, rollout.id, step=0, extra={"comment": "a good first guess"}, by="judge")

    Without `step`, the data is about the whole rollout; without `try_index`, about the try that counts. `objects` are
    `reward_data`, `env_state`, `extra`, `metrics` and `logs`. The reward itself is set by `Tape.score`.
    """
    check_names(objects)
    where = f"rollout {rollout_id}, " + ("final" if step is None else f"step {step}")
    fields, unrecorded = check_fields(objects, where)
    if unrecorded:
        raise RecordError("; ".join(unrecorded.values()))
    if not fields:
        raise RecordError(f"{where}: nothing to amend; give {', '.join(OBJECTS)}")
    index = None if step is None else as_count(step, f"{where}: step")
    tape.append_event(
        EventKind.TRACE, rollout_id, {"step": index, "amends": True, **fields}, by=by, try_index=try_index
    )


def _leave_messages_to_the_turn(fields: Fields) -> None:
    if isinstance(fields.get("prompt"), list):
        del fields["prompt"]
    if "role" in fields.get("policy_response", ()):
        del fields["policy_response"]


def _as_rewards(value: object) -> list[float]:
    """The reward in a list, or an empty list if it is not one."""
    if type(value) is float:
        return [value]
    return [*check_fields({"reward": value}, "")[0].values()]
