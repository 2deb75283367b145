"""A trace: the readable record of a rollout, step by step, with its rewards as numbers."""

from collections.abc import Mapping
from typing import Any, TypedDict

import msgspec

from rolltape.records.rollout import Status, StopReason
from rolltape.records.turn import Finish

Fields = dict[str, Any]

TRACE_SCHEMA = "rolltape.trace/1"  # a field may be added; a change of meaning raises the version


class TraceObjects(TypedDict, total=False):
    """The free-form JSON objects that an environment may record for a step, or for the whole rollout."""

    reward_data: Mapping[str, Any] | None  # how a reward came about
    env_state: Mapping[str, Any] | None
    extra: Mapping[str, Any] | None
    metrics: Mapping[str, Any] | None
    logs: Mapping[str, Any] | None


OBJECTS = tuple(TraceObjects.__annotations__)


class TraceStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step of an environment. A field that is None was not given, and is left out of files.

    A `prompt` of messages holds only those that follow the first `kept_messages` of the conversation of step
    `messages_from` (its prompt and its response), so that history is stored once. `Trace.whole_prompt` joins them.
    """

    index: int
    derived: bool = False  # no environment recorded it: a turn of the main branch stands for it
    turns: tuple[str, ...] = ()
    messages_from: int | None = None  # None: the prompt stands alone
    kept_messages: int = 0
    prompt: list[Any] | Fields | None = None
    policy_response: Fields | None = None
    reward: float | None = None
    done: bool | None = None
    stop_reason: StopReason | None = None
    reward_data: Fields | None = None
    env_state: Fields | None = None
    extra: Fields | None = None
    metrics: Fields | None = None
    logs: Fields | None = None
    prompt_tokens: int | None = None  # of the whole prompt
    sampled_tokens: int | None = None
    turn_rewards: dict[str, float] = {}  # scores of single turns, which are not part of the total
    finish: Finish | None = None  # how the turn's reply ended
    error: str | None = None  # of the engine
    started_at: float | None = None  # when its first turn was asked for, in seconds since the epoch
    ended_at: float | None = None  # when its last turn had ended
    unrecorded: dict[str, str] = {}  # fields that were given but could not be stored, and why


class Trace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The readable record of a rollout: its identity and outcome, and its steps.

    `total_reward` is the sum of the steps' rewards and `final_reward`. Every rollout has a trace; where no environment
    recorded one, the turns of its main branch stand for steps:

        run = rolltape.read("runs/exp1")
        for rollout in run.rollouts():
            trace = rolltape.trace_of(rollout)
            print(trace.task_id, trace.status, trace.total_reward)
            for step in trace.steps:
                print(step.index, step.prompt, step.policy_response, step.reward)
    """

    run: str
    rollout: str
    try_index: int
    group: str
    step: int  # the training step
    attempt: int
    source: str | None = None  # with its split
    task_id: str | None = None
    model: str | None = None
    agent: str | None = None
    tags: tuple[str, ...] = ()  # the latest ones, or those given at the start
    versions: tuple[str, ...] = ()  # weight versions, in order of first appearance
    status: Status
    reason: str | None = None
    stop_reason: StopReason | None = None
    filtered: str | None = None  # why it is kept out of training
    pruned: tuple[str, ...] = ()  # what of it was removed from the tape
    total_reward: float | None = None  # None: it has no reward
    final_reward: float | None = None  # what was added to the steps' rewards at the end
    reward_terms: dict[str, float] = {}
    # Recorded at the end, about the rollout as a whole.
    reward_data: Fields | None = None
    env_state: Fields | None = None
    extra: Fields | None = None
    metrics: Fields | None = None
    logs: Fields | None = None
    unrecorded: dict[str, str] = {}
    steps: tuple[TraceStep, ...] = ()

    def whole_prompt(self, index: int) -> list[Any] | Fields | None:
        """The prompt of a step with all of its history, or None if there is none."""
        steps = {step.index: step for step in self.steps}
        step = steps.get(index)
        if step is None or not isinstance(step.prompt, list):
            return None if step is None else step.prompt
        limit = step.kept_messages + len(step.prompt)
        parts: list[list[Any]] = []
        while step is not None and isinstance(step.prompt, list):
            messages = step.prompt if step.policy_response is None else [*step.prompt, step.policy_response]
            parts.append(messages[: max(limit - step.kept_messages, 0)])
            limit = min(limit, step.kept_messages)
            step = None if step.messages_from is None else steps.get(step.messages_from)
        return [message for part in reversed(parts) for message in part]

    def to_dict(self, *, whole_prompts: bool = False) -> Fields:
        """The trace as plain values, absent fields left out; prompts hold what is new in them, or all messages."""
        plain: Fields = {"schema": TRACE_SCHEMA, **msgspec.to_builtins(self)}
        if whole_prompts:
            for step in plain.get("steps", ()):
                if step.pop("messages_from", None) is not None:
                    del step["kept_messages"]
                    step["prompt"] = self.whole_prompt(step["index"])
        return plain
