"""A rollout as it is read: every turn in order, what its prompt brought, its reply, and what came of the step."""

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rolltape.records.brief import message_parts
from rolltape.records.fork import Fork, ForkCause
from rolltape.records.jsonable import encode_numbers
from rolltape.records.rollout import Rollout, Session
from rolltape.records.trace import Trace, TraceStep
from rolltape.records.wording import number, plural
from rolltape.tree import PlacedTurn, forks_of, tree_of
from rolltape.tree.lanes import headline, new_messages

NOT_RECORDED = "not recorded"
_OBJECTS = ("reward_data", "env_state", "extra", "metrics", "logs")

Part = tuple[str, str]  # who speaks, or what it is; and the text


class Passage(NamedTuple):
    """A turn, or a step without one, or the end."""

    title: str
    cause: ForkCause | None
    parts: list[Part]


def transcript_of(rollout: Rollout, trace: Trace) -> Iterator[Passage]:
    """All that was said. What an environment said of a step is with the step's last turn."""
    known = {turn.id for turn in rollout.turns}
    steps = _by_last_turn(trace, known)
    yield from map(_bare_step, steps.get(None, ()))
    for session in rollout.sessions:
        yield from session_transcript(session, steps)
    ends = list(remarks(trace))
    if trace.total_reward is not None or ends:
        yield Passage("end" if trace.total_reward is None else total(trace), None, ends)


def session_transcript(session: Session, steps: Mapping[str | None, Sequence[TraceStep]] = {}) -> Iterator[Passage]:
    """What was said in one session; `steps` are by the turn with which they end, or after which they come."""
    tree = tree_of(session)
    forks = {fork.turn: fork for fork in forks_of(tree)}
    for placed in tree.turns:
        turn = placed.turn.id
        own, *after = steps.get(turn) or (None,)
        yield _turn(placed, session.ordinal, forks.get(turn), own)
        yield from (_bare_step(step) for step in after if step is not None)


def _by_last_turn(trace: Trace, known: Container[str]) -> dict[str | None, list[TraceStep]]:
    """Each step with its last turn; one without a turn after the step before it, None for the beginning."""
    found: dict[str | None, list[TraceStep]] = {None: []}
    last: str | None = None
    for step in trace.steps:
        last = next((turn for turn in reversed(step.turns) if turn in known), last)
        found.setdefault(last, []).append(step)
    return found


def step_facts(step: TraceStep) -> list[str]:
    """What an environment made of a step."""
    facts = [] if step.stop_reason is None else [step.stop_reason.value]
    facts += ["done"] if step.done else []
    return facts if step.reward is None else [*facts, f"reward {number(step.reward)}"]


def remarks(said_of: Trace | TraceStep) -> Iterator[Part]:
    """What is told of a step, or of the whole, under its name; and what could not be kept."""
    for name in _OBJECTS:
        value = getattr(said_of, name)
        if value is not None:
            yield name, encode_numbers(value, name).decode()
    for why in said_of.unrecorded.values():
        yield NOT_RECORDED, why


def total(trace: Trace) -> str:
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
        told = step_facts(ends)
        parts += [(f"step {ends.index}", ", ".join(told))] if told else []
        parts += remarks(ends)
    return Passage(f"turn {ordinal}.{headline(placed, None)}", None if fork is None else fork.cause, parts)


def _bare_step(step: TraceStep) -> Passage:
    """A step of which there are no turns: what the environment itself recorded."""
    given: list[Any] = [*(step.prompt if isinstance(step.prompt, list) else [step.prompt]), step.policy_response]
    parts: list[Part] = []
    for message in given:
        if isinstance(message, dict) and "role" in message:
            parts += message_parts(message)
        elif message is not None:
            parts.append(("message", json.dumps(message, ensure_ascii=False, default=str)))
    return Passage(", ".join([f"step {step.index}", *step_facts(step)]), None, [*parts, *remarks(step)])
