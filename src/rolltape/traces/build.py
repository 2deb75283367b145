"""A rollout → its trace."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from rolltape.records.rollout import EventKind, Rollout, Status
from rolltape.records.trace import Trace, TraceStep
from rolltape.records.turn import Turn
from rolltape.traces.branch import NewMessages, unrecorded_turns
from rolltape.traces.rewards import final_of, summed
from rolltape.traces.statements import Fields, Statements, statements_of

T = TypeVar("T", Trace, TraceStep)


def trace_of(rollout: Rollout) -> Trace:
    """The trace of a rollout as it is on the tape, however it ended. Turns stand for steps that nobody recorded."""
    said = statements_of(rollout.events)
    steps = _steps(rollout, said)
    total, final = _rewards(rollout, [step.reward for step in steps if step.reward is not None], said.final)
    head, outcome = rollout.head, rollout.outcome
    return _record(
        Trace,
        said.final
        | {
            "run": head.run,
            "rollout": head.id,
            "try_index": head.try_index,
            "group": head.group,
            "step": head.step,
            "attempt": head.attempt,
            "source": head.source,
            "task_id": head.task_id,
            "model": head.model,
            "agent": head.agent,
            "tags": outcome.tags or head.tags,
            "versions": _versions(rollout),
            "status": outcome.status,
            "reason": outcome.reason,
            "stop_reason": outcome.stop_reason,
            "filtered": outcome.filtered,
            "pruned": _pruned(rollout),
            "total_reward": total,
            "final_reward": final,
            "reward_terms": outcome.reward_terms,
            "steps": steps,
        },
    )


def _steps(rollout: Rollout, said: Statements) -> list[TraceStep]:
    turns = {turn.id: turn for turn in rollout.turns}
    known = NewMessages()
    built: dict[int, TraceStep] = {}
    named: list[Turn] = []
    for index in sorted(said.recorded):
        fields = said.steps[index]
        own = [turns[turn] for turn in fields.get("turns", ()) if turn in turns]
        built[index] = _step(index, fields, own, known)
        named += own
    if named or not built:
        after = max(built, default=-1) + 1
        for index, turn in enumerate(unrecorded_turns(rollout, named), after):
            fields = said.steps.get(index, {}) | {"turns": [turn.id], "derived": True}
            built[index] = _step(index, fields, [turn], known)
    # Said of a step that is not there: it is shown, and `rolltape check` names it.
    for index in said.steps.keys() - built.keys():
        built[index] = _step(index, said.steps[index], [], known)
    return [built[index] for index in sorted(built)]


def _step(index: int, fields: Fields, turns: Sequence[Turn], known: NewMessages) -> TraceStep:
    fields = fields | {"index": index}
    return _record(TraceStep, _of_turns(index, fields, turns, known) | fields if turns else fields)


def _of_turns(index: int, fields: Fields, turns: Sequence[Turn], known: NewMessages) -> Fields:
    """What the turns of a step say of it; the last one's prompt holds those before it."""
    last = turns[-1]
    found: Fields = {
        "prompt_tokens": len(last.prompt_tokens),
        "sampled_tokens": sum(len(turn.sampled_ids) for turn in turns),
        "turn_rewards": {turn.id: turn.facts.reward for turn in turns if turn.facts.reward is not None},
        "finish": last.facts.finish,
        "error": last.facts.error,
        "started_at": turns[0].facts.started_at,
        "ended_at": last.facts.ended_at,
    }
    if "prompt" not in fields:
        step, kept, new = known.of(last.prompt)
        found |= {"messages_from": step, "kept_messages": kept, "prompt": [message.to_dict() for message in new]}
        known.add(index, last.prompt)
        if "policy_response" not in fields:
            known.add(index, last.messages)
    if last.reply is not None:
        found["policy_response"] = last.reply.to_dict()
    return found


def _rewards(rollout: Rollout, step_rewards: list[float], said: Fields) -> tuple[float | None, float | None]:
    """The total, and the final reward that the steps' add up to it with."""
    final: float | None = said.get("reward")
    rewards = step_rewards if final is None else [*step_rewards, final]
    total = rollout.reward
    if total is None:
        # Without a reward of its own a finished rollout has what its trace comes to, and one that failed has none.
        return summed(rewards) if rewards and rollout.status is Status.FINISHED else None, final
    return total, final_of(total, step_rewards, final)


def _versions(rollout: Rollout) -> list[str]:
    found: dict[str, None] = {}
    for turn in rollout.turns:
        for segment in turn.facts.segments:
            found |= {one: None for one in (segment.first_version, segment.last_version) if one is not None}
    return list(found)


def _pruned(rollout: Rollout) -> list[str]:
    said = (event.data.get("pruned") for event in rollout.events if event.kind == EventKind.PRUNE)
    return list(dict.fromkeys(str(what) for what in said if what))


def _record(kind: type[T], fields: Mapping[str, Any]) -> T:
    """A record out of what the tape holds, in which a newer version may have written more."""
    return msgspec.convert(fields, kind)
