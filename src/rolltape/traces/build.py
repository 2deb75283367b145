"""Builds the trace of a rollout from its events and the turns of its main branches, and adds up its rewards."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from rolltape.records.messages import Message, MessageChain
from rolltape.records.rollout import UNGRADED, Event, EventKind, Rollout, Session, Status, pruned_of
from rolltape.records.trace import Fields, Trace, TraceStep
from rolltape.records.turn import Turn, weight_versions
from rolltape.tree import PlacedTurn, tree_of

_FROM_HEAD = ("run", "try_index", "group", "step", "attempt", "source", "task_id", "model", "agent")
_FROM_OUTCOME = ("status", "reason", "stop_reason", "filtered", "reward_terms")
_ROUNDING = 1e-6  # an environment may add up its rewards in single precision


def summed(rewards: Iterable[float]) -> float:
    """The sum. NaN and infinity are allowed."""
    rewards = list(rewards)
    return math.fsum(rewards) if all(map(math.isfinite, rewards)) else sum(rewards)


def agree(total: float, rewards: Iterable[float]) -> bool:
    """Whether rewards add up to a total, apart from rounding."""
    rewards = list(rewards)
    found = summed(rewards)
    if not (math.isfinite(total) and math.isfinite(found)):
        return total == found or (math.isnan(total) and math.isnan(found))
    return abs(total - found) <= _ROUNDING * summed(map(abs, rewards))


def final_reward(total: float, step_rewards: list[float], given: float | None) -> float | None:
    """The final reward that gives a total together with the steps' rewards.

    The given one counts if it does. Otherwise the total was set later, and the final reward is the difference.
    """
    rewards = step_rewards if given is None else [*step_rewards, given]
    if rewards and agree(total, rewards):
        return given
    return summed([total, *(-reward for reward in step_rewards)])


class NewMessages:
    """Records which step had a conversation first, to find what a later prompt adds to it."""

    def __init__(self) -> None:
        self._step_of: dict[int, int] = {}  # by the identity of a chain, which its turn keeps alive

    def add(self, step: int, *chains: MessageChain) -> None:
        """Remember a step whose conversation begins with these chains."""
        for chain in chains:
            self._step_of.setdefault(id(chain), step)

    def find(self, prompt: MessageChain) -> tuple[int | None, int, list[Message]]:
        """The step that a prompt continues (None: none), how many of its messages it keeps, and those that follow."""
        new: list[Message] = []
        limit = len(prompt)
        link: MessageChain | None = prompt
        while link is not None and id(link) not in self._step_of:
            new.extend(reversed(link.own[: max(limit - link.keep, 0)]))
            limit = min(limit, link.keep)
            link = link.parent
        step = None if link is None or not limit else self._step_of[id(link)]
        return step, limit if step is not None else 0, new[::-1]


class TraceEvents(NamedTuple):
    """The fields that the events of a trace give. The latest value of each field counts."""

    steps: dict[int, Fields]
    final: Fields
    recorded: frozenset[int]  # steps that the environment itself recorded; others were only amended


def merge_events(events: Iterable[Event]) -> TraceEvents:
    """Merge the trace events of a rollout, given in their order."""
    steps: dict[int, Fields] = {}
    final: Fields = {}
    recorded: set[int] = set()
    for event in events:
        if event.kind != EventKind.TRACE:
            continue
        new = dict(event.data)
        index, amends = new.pop("step", None), new.pop("amends", False)
        held = final if index is None else steps.setdefault(index, {})
        # A field that is given again is no longer missing.
        missing = {name: why for name, why in held.get("unrecorded", {}).items() if name.partition(".")[0] not in new}
        held |= new
        held["unrecorded"] = missing | new.get("unrecorded", {})
        if index is not None and not amends:
            recorded.add(index)
    return TraceEvents(dict(sorted(steps.items())), final, frozenset(recorded))


def trace_of(rollout: Rollout) -> Trace:
    """Build the trace of a rollout, however it ended. Turns stand for steps that no environment recorded.

    Example:

        trace = rolltape.trace_of(rolltape.read("runs/exp1").rollout(rollout_id))
    """
    merged = merge_events(rollout.events)
    steps = _steps(rollout, merged)
    total, final = _rewards(rollout, [step.reward for step in steps if step.reward is not None], merged.final)
    head, outcome = rollout.head, rollout.outcome
    return msgspec.convert(
        merged.final
        | {
            **{name: getattr(head, name) for name in _FROM_HEAD},
            **{name: getattr(outcome, name) for name in _FROM_OUTCOME},
            "rollout": head.id,
            "tags": outcome.tags,
            "versions": weight_versions(rollout.turns),
            "pruned": pruned_of(rollout.events),
            "total_reward": total,
            "final_reward": final,
            "steps": steps,
        },
        Trace,
    )


def _steps(rollout: Rollout, merged: TraceEvents) -> list[TraceStep]:
    turns = {turn.id: turn for turn in rollout.turns}
    known = NewMessages()
    built: dict[int, TraceStep] = {}
    named: list[Turn] = []
    for index in sorted(merged.recorded):
        fields = merged.steps[index]
        own = [turns[turn] for turn in fields.get("turns", ()) if turn in turns]
        built[index] = _step(index, fields, own, known)
        named += own
    if named or not built:
        after = max(built, default=-1) + 1
        for index, turn in enumerate(unrecorded_turns(rollout, named), after):
            fields = merged.steps.get(index, {}) | {"turns": [turn.id], "derived": True}
            built[index] = _step(index, fields, [turn], known)
    # Amended steps that do not exist are shown, and `rolltape check` reports them.
    for index in merged.steps.keys() - built.keys():
        built[index] = _step(index, merged.steps[index], [], known)
    return [built[index] for index in sorted(built)]


def _step(index: int, fields: Fields, turns: Sequence[Turn], known: NewMessages) -> TraceStep:
    fields = fields | {"index": index}
    return msgspec.convert(_turn_fields(index, fields, turns, known) | fields if turns else fields, TraceStep)


def _turn_fields(index: int, fields: Fields, turns: Sequence[Turn], known: NewMessages) -> Fields:
    """The fields that come from a step's turns; the prompt of the last turn holds the earlier ones."""
    last = turns[-1]
    found: Fields = {
        "prompt_tokens": len(last.prompt_tokens) if last.has_ids else None,
        "sampled_tokens": sum(len(turn.sampled_ids) for turn in turns) if last.has_ids else None,
        "turn_rewards": {turn.id: turn.facts.reward for turn in turns if turn.facts.reward is not None},
        "finish": last.facts.finish,
        "error": last.facts.error,
        "started_at": turns[0].facts.started_at,
        "ended_at": last.facts.ended_at,
    }
    if "prompt" not in fields:
        step, kept, new = known.find(last.prompt)
        found |= {"messages_from": step, "kept_messages": kept, "prompt": [message.to_dict() for message in new]}
        known.add(index, last.prompt)
        if "policy_response" not in fields:
            known.add(index, last.messages)
    if last.reply is not None:
        found["policy_response"] = last.reply.to_dict()
    return found


def _rewards(rollout: Rollout, step_rewards: list[float], fields: Fields) -> tuple[float | None, float | None]:
    """The total reward and the final one."""
    final: float | None = fields.get("reward")
    rewards = step_rewards if final is None else [*step_rewards, final]
    total = rollout.reward
    if total is None:
        # A finished rollout without its own reward has the sum of its trace. A failed one has none.
        is_known = rollout.status is Status.FINISHED and not (rollout.outcome.reason or "").startswith(UNGRADED)
        return summed(rewards) if rewards and is_known else None, final
    return total, final_reward(total, step_rewards, final)


def unrecorded_turns(rollout: Rollout, named: Iterable[Turn]) -> Iterator[Turn]:
    """The turns of main branches after the last turn that a step names; all of them if no step names a turn."""
    last: dict[str, int] = {}
    for turn in named:
        last[turn.session] = max(turn.sequence, last.get(turn.session, -1))
    for session in rollout.sessions:
        if last and session.id not in last:
            continue
        start = last.get(session.id, -1) + 1
        if session.turns and session.turns[-1].sequence >= start:
            yield from (turn for turn in main_branch(session) if turn.sequence >= start)


def main_branch(session: Session) -> list[Turn]:
    """The turns on the path to a session's last turn that is not auxiliary."""
    own = (placed for placed in reversed(tree_of(session).turns) if placed.is_task)
    placed: PlacedTurn | None = next(own, None)
    branch: list[Turn] = []
    while placed is not None:
        branch.append(placed.turn)
        placed = placed.parent
    return branch[::-1]
