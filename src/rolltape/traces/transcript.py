"""A rollout as readable passages: each turn with its new messages, its reply, and the environment's data."""

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rolltape.records.fork import Fork, ForkCause
from rolltape.records.jsonable import encode_numbers
from rolltape.records.rollout import Rollout, Session
from rolltape.records.trace import OBJECTS, Trace, TraceStep
from rolltape.records.wording import message_parts, number, plural
from rolltape.tree import PlacedTurn, forks_of, tree_of
from rolltape.tree.drawing import headline, new_messages

NOT_RECORDED = "not recorded"

Part = tuple[str, str]  # a speaker's role or a kind, and the text


class Passage(NamedTuple):
    """A turn, a step without a turn, or the end."""

    title: str
    cause: ForkCause | None
    parts: list[Part]


def build_transcript(rollout: Rollout, trace: Trace) -> Iterator[Passage]:
    """The passages of a rollout. What an environment recorded for a step follows the step's last turn."""
    known = {turn.id for turn in rollout.turns}
    steps = _steps_by_last_turn(trace, known)
    yield from map(_bare_step, steps.get(None, ()))
    for session in rollout.sessions:
        yield from session_transcript(session, steps)
    ends = list(remarks(trace))
    if trace.total_reward is not None or ends:
        yield Passage("end" if trace.total_reward is None else reward_sum(trace), None, ends)


def session_transcript(session: Session, steps: Mapping[str | None, Sequence[TraceStep]] = {}) -> Iterator[Passage]:
    """The passages of one session. `steps` are by the turn that they end with or follow."""
    tree = tree_of(session)
    forks = {fork.turn: fork for fork in forks_of(tree)}
    for placed in tree.turns:
        turn = placed.turn.id
        own, *after = steps.get(turn) or (None,)
        yield _turn(placed, session.ordinal, forks.get(turn), own)
        yield from (_bare_step(step) for step in after if step is not None)


def _steps_by_last_turn(trace: Trace, known: Container[str]) -> dict[str | None, list[TraceStep]]:
    """Steps by their last turn. A step without a turn is under the turn before it, or under None at the beginning."""
    found: dict[str | None, list[TraceStep]] = {None: []}
    last: str | None = None
    for step in trace.steps:
        last = next((turn for turn in reversed(step.turns) if turn in known), last)
        found.setdefault(last, []).append(step)
    return found


def step_facts(step: TraceStep) -> list[str]:
    """Stop reason, end and reward of a step, as words."""
    facts = [] if step.stop_reason is None else [step.stop_reason.value]
    facts += ["done"] if step.done else []
    return facts if step.reward is None else [*facts, f"reward {number(step.reward)}"]


def remarks(record: Trace | TraceStep) -> Iterator[Part]:
    """The objects of a step or a trace under their names, and what could not be stored."""
    for name in OBJECTS:
        value = getattr(record, name)
        if value is not None:
            yield name, encode_numbers(value, name).decode()
    for why in record.unrecorded.values():
        yield NOT_RECORDED, why


def reward_sum(trace: Trace) -> str:
    """How the reward adds up."""
    given = [step.reward for step in trace.steps if step.reward is not None]
    parts = [f"{number(sum(given))} in {plural(len(given), 'step')}"] if given else []
    parts += [] if trace.final_reward is None else [f"{number(trace.final_reward)} at the end"]
    return f"total {number(trace.total_reward)} = {' + '.join(parts)}"


def _turn(placed: PlacedTurn, ordinal: int, fork: Fork | None, ends: TraceStep | None) -> Passage:
    reply, facts = placed.turn.reply, placed.turn.facts
    parts = [part for message in new_messages(placed) for part in message_parts(message.to_dict())]
    parts += [] if reply is None else message_parts(reply.to_dict())
    parts += [] if facts.error is None else [("error", facts.error)]
    parts += [] if facts.reward is None else [("reward", number(facts.reward))]
    if ends is not None:
        facts_of_step = step_facts(ends)
        parts += [(f"step {ends.index}", ", ".join(facts_of_step))] if facts_of_step else []
        parts += remarks(ends)
    return Passage(f"turn {ordinal}.{headline(placed, None)}", None if fork is None else fork.cause, parts)


def _bare_step(step: TraceStep) -> Passage:
    """A step without turns: what the environment itself recorded."""
    given: list[Any] = [*(step.prompt if isinstance(step.prompt, list) else [step.prompt]), step.policy_response]
    parts: list[Part] = []
    for message in given:
        if isinstance(message, dict) and "role" in message:
            parts += message_parts(message)
        elif message is not None:
            parts.append(("message", json.dumps(message, ensure_ascii=False, default=str)))
    return Passage(", ".join([f"step {step.index}", *step_facts(step)]), None, [*parts, *remarks(step)])
