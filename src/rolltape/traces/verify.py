"""Checks the trace of a rollout for missing steps, missing turns and rewards that do not add up."""

from collections.abc import Iterator

from rolltape.records.rollout import EventKind, Rollout
from rolltape.records.trace import Trace
from rolltape.traces.build import TraceEvents, agree, merge_events, summed, trace_of


def find_problems(rollout: Rollout) -> list[str]:
    """The problems of a rollout's trace, one sentence each."""
    merged = merge_events(rollout.events)
    if not merged.steps and not merged.final:
        return []
    trace = trace_of(rollout)
    return [
        *_gaps(merged),
        *_lost_turns(rollout, trace),
        *_dangling(trace),
        *_bare(trace, merged),
        *_sums(rollout, merged),
    ]


def _gaps(merged: TraceEvents) -> Iterator[str]:
    missing = set(range(max(merged.recorded, default=-1) + 1)) - merged.recorded
    if missing:
        yield f"step {min(missing)} of its trace is missing" + (f", and {len(missing) - 1} more" * (len(missing) > 1))


def _lost_turns(rollout: Rollout, trace: Trace) -> Iterator[str]:
    held = {turn.id for turn in rollout.turns}
    for step in trace.steps:
        for turn in step.turns:
            if turn not in held and "turns" not in trace.pruned:
                yield f"step {step.index} of its trace is of turn {turn}, which the rollout does not have"


def _dangling(trace: Trace) -> Iterator[str]:
    lengths: dict[int, int] = {}
    for step in trace.steps:
        held = 0 if step.messages_from is None else lengths.get(step.messages_from, 0)
        if step.kept_messages > held:
            yield (
                f"step {step.index} of its trace keeps {step.kept_messages} messages of step {step.messages_from}, "
                f"which has {held}"
            )
        if isinstance(step.prompt, list):
            lengths[step.index] = step.kept_messages + len(step.prompt) + (step.policy_response is not None)


def _bare(trace: Trace, merged: TraceEvents) -> Iterator[str]:
    for step in trace.steps:
        if step.index not in merged.recorded and not step.derived:
            yield f"step {step.index} of its trace was amended, but there is no such step"


def _sums(rollout: Rollout, merged: TraceEvents) -> Iterator[str]:
    """The reward of the finish must be the sum of the trace's rewards; a later reward may differ."""
    final = merged.final.get("reward")
    rewards = [fields["reward"] for fields in merged.steps.values() if fields.get("reward") is not None]
    score = next((one for one in rollout.events if one.kind == EventKind.SCORE and one.turn is None), None)
    finish = next((one for one in rollout.events if one.kind == EventKind.FINISH), None)
    if final is None or score is None or finish is None or list(_gaps(merged)):
        return
    reward, rewards = score.data["reward"], [*rewards, final]
    at_once = (score.writer, score.sequence) == (finish.writer, finish.sequence + 1)
    if at_once and not agree(reward, rewards):
        yield f"it was finished with the reward {reward!r}, its trace sums to {summed(rewards)!r}"
