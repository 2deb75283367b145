"""What must hold of a trace, checked on a rollout as it is on the tape."""

from collections.abc import Iterator

from rolltape.records.rollout import EventKind, Rollout
from rolltape.records.trace import Trace
from rolltape.traces.build import trace_of
from rolltape.traces.rewards import agree, summed
from rolltape.traces.statements import Statements, statements_of


def problems_of(rollout: Rollout) -> list[str]:
    """What is wrong with a rollout's trace, in words."""
    said = statements_of(rollout.events)
    if not said.steps and not said.final:
        return []
    trace = trace_of(rollout)
    return [*_gaps(said), *_lost_turns(rollout, trace), *_dangling(trace), *_bare(trace, said), *_sums(rollout, said)]


def _gaps(said: Statements) -> Iterator[str]:
    missing = set(range(max(said.recorded, default=-1) + 1)) - said.recorded
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


def _bare(trace: Trace, said: Statements) -> Iterator[str]:
    for step in trace.steps:
        if step.index not in said.recorded and not step.derived:
            yield f"step {step.index} of its trace was amended, but there is no such step"


def _sums(rollout: Rollout, said: Statements) -> Iterator[str]:
    """The reward that the rollout was finished with is that of its steps and the final one; later ones revise it."""
    final = said.final.get("reward")
    rewards = [fields["reward"] for fields in said.steps.values() if fields.get("reward") is not None]
    score = next((one for one in rollout.events if one.kind == EventKind.SCORE and one.turn is None), None)
    finish = next((one for one in rollout.events if one.kind == EventKind.FINISH), None)
    if final is None or score is None or finish is None or list(_gaps(said)):
        return
    reward, rewards = score.data["reward"], [*rewards, final]
    at_once = (score.writer, score.sequence) == (finish.writer, finish.sequence + 1)
    if at_once and not agree(reward, rewards):
        yield f"it was finished with the reward {reward!r}, its trace sums to {summed(rewards)!r}"
