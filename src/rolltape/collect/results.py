"""What became of one rollout, all of it in one object: a line of the file that `rolltape collect -o` writes."""

from collections.abc import Mapping
from typing import Any

import msgspec

from rolltape.collect.environments.protocol import Ended, Message, Score
from rolltape.records.rollout import Rollout, Status, StopReason
from rolltape.records.trace import Trace
from rolltape.records.turn import Turn
from rolltape.traces import trace_of
from rolltape.traces.branch import main_branch
from rolltape.traces.rewards import final_of

RECORD_SCHEMA = "rolltape.collected/1"  # a field may be added; a change of meaning raises the version


class Info(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """By whom and for what, how much it took, and how the agent ended."""

    agent: str | None = None
    seat: str | None = None  # None: there is one alone
    model: str | None = None
    step: int  # the training step
    versions: tuple[str, ...] = ()  # of weights, as they first appear
    turns: int
    sampled_tokens: int
    exit_code: int | None = None  # of an agent that is a program
    signal: int | None = None  # that ended it
    timed_out: bool = False


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rollout that has ended. A field that is None was not given, and is left out of files."""

    rollout: str
    try_index: int
    run: str
    group: str
    source: str | None = None  # with its split, as in the rollout's id
    split: str | None = None
    task_index: int | None = None  # the task's place in the source
    task_id: str | None = None
    attempt: int
    status: Status
    done: bool  # it has finished: an outcome of the policy's own, and nothing that broke
    stop_reason: StopReason | None = None
    reason: str | None = None  # why it failed, or why it has no reward
    reward: float | None = None
    reward_terms: dict[str, float] = {}
    content: str | None = None  # the last reply's text, or what a program printed
    prompt: list[Message] | None = None  # the first turn's; None: nothing was asked
    messages: list[Message] | None = None  # the conversation as it was at the end
    task: Any = None
    metrics: dict[str, Any] | None = None  # of each name what was said last
    info: Info
    trace: Trace | None = None

    def to_dict(self) -> dict[str, Any]:
        """The record as plain values, absent fields left out."""
        plain: dict[str, Any] = {"schema": RECORD_SCHEMA, **msgspec.to_builtins(self)}
        if self.trace is not None:
            plain["trace"] = self.trace.to_dict()
        return plain


def record_of(
    rollout: Rollout,
    *,
    task_index: int | None = None,
    seat: str | None = None,
    ended: Ended | None = None,
    agent_end: Mapping[str, Any] | None = None,
    traced: bool = True,
) -> Record:
    """The record of a rollout as it is on the tape.

    `ended` is what its agent said, if that is still known, and `agent_end` how it ended; None: as its trace has it.
    """
    head, outcome = rollout.head, rollout.outcome
    trace = trace_of(rollout)
    turns = [turn for session in rollout.sessions[:1] for turn in main_branch(session)]
    how = (trace.extra or {}) if agent_end is None else agent_end
    return Record(
        rollout=head.id,
        try_index=head.try_index,
        run=head.run,
        group=head.group,
        source=head.source,
        split=head.split,
        task_index=task_index,
        task_id=head.task_id,
        attempt=head.attempt,
        status=outcome.status,
        done=outcome.status is Status.FINISHED,
        stop_reason=outcome.stop_reason,
        reason=outcome.reason,
        reward=outcome.reward,
        reward_terms=outcome.reward_terms,
        content=ended.text if ended is not None else _last_text(turns),
        prompt=turns[0].prompt_messages if turns else None,
        messages=list(ended.messages) if ended is not None and ended.messages else _conversation(turns),
        task=head.task,
        metrics=_metrics(trace),
        info=Info(
            agent=head.agent,
            seat=seat,
            model=head.model,
            step=head.step,
            versions=trace.versions,
            turns=len(rollout.turns),
            sampled_tokens=sum(len(turn.sampled_ids) for turn in rollout.turns),
            exit_code=how.get("exit_code"),
            signal=how.get("signal"),
            timed_out=how.get("timed_out", False),
        ),
        trace=trace if traced else None,
    )


def compared(record: Record, score: Score, reason: str | None) -> Record:
    """The record of a rollout that was scored when its group was complete, as the tape has it by then."""
    said = msgspec.structs.replace(record, reason=reason, trace=_amended(record.trace, score))
    if score.reward is None:
        return said
    return msgspec.structs.replace(said, reward=score.reward, reward_terms=dict(score.terms))


def _amended(trace: Trace | None, score: Score) -> Trace | None:
    if trace is None:
        return None
    data = score.to_data()
    trace = msgspec.structs.replace(trace, reward_data=data) if data else trace
    if score.reward is None:
        return trace
    rewards = [step.reward for step in trace.steps if step.reward is not None]
    final = final_of(score.reward, rewards, trace.final_reward)
    terms = dict(score.terms)
    return msgspec.structs.replace(trace, total_reward=score.reward, final_reward=final, reward_terms=terms)


def _conversation(turns: list[Turn]) -> list[Message] | None:
    return [message.to_dict() for message in turns[-1].messages.to_list()] if turns else None


def _last_text(turns: list[Turn]) -> str | None:
    return next((turn.reply.text for turn in reversed(turns) if turn.reply is not None), None)


def _metrics(trace: Trace) -> dict[str, Any] | None:
    said = [step.metrics for step in trace.steps] + [trace.metrics]
    return {name: value for metrics in said if metrics for name, value in metrics.items()} or None
