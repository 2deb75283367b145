"""A trace: the readable record of a rollout, step by step, with its rewards as numbers."""

from typing import Any

import msgspec

from rolltape.records.rollout import Status, StopReason
from rolltape.records.turn import Finish

Fields = dict[str, Any]

TRACE_SCHEMA = "rolltape.trace/1"  # a field may be added; a change of meaning raises the version


class TraceStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step of an environment. A field that is None was not given, and is left out of files.

    A `prompt` of messages holds those that follow the first `kept_messages` of the conversation of the step
    `messages_from`, its prompt and its response together: history is held once.
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
    turn_rewards: dict[str, float] = {}  # scores of its turns alone, which are no part of the total
    finish: Finish | None = None  # how the turn's reply ended
    error: str | None = None  # what the engine said
    started_at: float | None = None  # when its first turn was asked for, in seconds since the epoch
    ended_at: float | None = None  # when its last turn had ended
    unrecorded: dict[str, str] = {}  # what was given and could not be kept, and why


class Trace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rollout's summary and its steps. `total_reward` is the sum of the steps' rewards and the final one."""

    run: str
    rollout: str
    try_index: int
    group: str
    step: int  # the training step
    attempt: int
    source: str | None = None  # its split included
    task_id: str | None = None
    model: str | None = None
    agent: str | None = None
    tags: tuple[str, ...] = ()  # the latest ones, else those given at the start
    versions: tuple[str, ...] = ()  # weight versions, as they first appear
    status: Status
    reason: str | None = None
    stop_reason: StopReason | None = None
    filtered: str | None = None  # why it is kept out of training
    pruned: tuple[str, ...] = ()  # what of it has left the tape
    total_reward: float | None = None  # None: it has no reward
    final_reward: float | None = None  # what came on top of the steps' rewards
    reward_terms: dict[str, float] = {}
    # What was said at the end, of the rollout as a whole.
    reward_data: Fields | None = None
    env_state: Fields | None = None
    extra: Fields | None = None
    metrics: Fields | None = None
    logs: Fields | None = None
    unrecorded: dict[str, str] = {}
    steps: tuple[TraceStep, ...] = ()

    def whole_prompt(self, index: int) -> list[Any] | Fields | None:
        """The prompt of a step with all of its history; None: there is none."""
        step: TraceStep | None = self._by_index.get(index)
        if step is None or not isinstance(step.prompt, list):
            return None if step is None else step.prompt
        limit = step.kept_messages + len(step.prompt)
        stretches: list[list[Any]] = []
        while step is not None and isinstance(step.prompt, list):
            said = step.prompt if step.policy_response is None else [*step.prompt, step.policy_response]
            stretches.append(said[: max(limit - step.kept_messages, 0)])
            limit = min(limit, step.kept_messages)
            step = None if step.messages_from is None else self._by_index.get(step.messages_from)
        return [message for stretch in reversed(stretches) for message in stretch]

    def to_dict(self, *, whole_prompts: bool = False) -> Fields:
        """The trace as plain values, absent fields left out; prompts as what is new in them, or whole."""
        plain: Fields = {"schema": TRACE_SCHEMA, **msgspec.to_builtins(self)}
        if whole_prompts:
            for step in plain.get("steps", ()):
                if step.pop("messages_from", None) is not None:
                    del step["kept_messages"]
                    step["prompt"] = self.whole_prompt(step["index"])
        return plain

    @property
    def _by_index(self) -> dict[int, TraceStep]:
        return {step.index: step for step in self.steps}
