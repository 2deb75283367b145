"""What is stored → a Rollout: chains of shared beginnings laid again, the latest events applied to their turns."""

from collections.abc import Sequence

import msgspec

from rolltape.errors import DamagedTapeError
from rolltape.records.ids import session_id
from rolltape.records.jsonable import decode_record
from rolltape.records.messages import MessageChain
from rolltape.records.rollout import Event, EventKind, Rollout, RolloutHead, Session, SessionHead
from rolltape.records.tokens import TokenChain
from rolltape.records.turn import Delivery, Turn, TurnFacts
from rolltape.tape.stored import Problem, StoredSession, StoredTurn


def rebuilt(
    head: RolloutHead,
    stored: Sequence[StoredSession],
    events: Sequence[Event],
    alive: bool,
    where: str,
    folder: str | None = None,
) -> tuple[Rollout, list[Problem]]:
    """The rollout with all turns that can be had, and what is missing of it. `folder` is that of its run."""
    problems: list[Problem] = []
    in_order = sorted(events, key=lambda event: event.order)
    facts_later = _facts_said_later(in_order)
    pruned = pruned_of(in_order)
    sessions: list[Session] = []
    for session in sorted(stored, key=lambda one: one.ordinal):
        try:
            session_head = decode_record(session.head, SessionHead, f"session {session.ordinal} of rollout {head.id}")
        except DamagedTapeError as error:
            problems.append(Problem(where, str(error), f"session {session.ordinal} of rollout {head.id}"))
            continue
        turns, missing = _turns_of(session_head.id, session.turns, facts_later, where)
        problems += missing
        sessions.append(Session(session_head, turns, folder))
    if "turns" not in pruned:
        problems += _missing_at_the_end(head, sessions, stored, in_order, where)
        problems += _said_of_no_turn(head, stored, in_order)
    return Rollout(head, sessions, in_order, alive), problems


def pruned_of(events: Sequence[Event]) -> tuple[str, ...]:
    """What was pruned of a rollout: "turns", or "side array NAME"."""
    found: dict[str, None] = {}
    for event in events:
        if event.kind == EventKind.PRUNE and event.data.get("pruned"):
            found[str(event.data["pruned"])] = None
    return tuple(found)


def _turns_of(
    session: str, stored: Sequence[StoredTurn], later: dict[str, dict[str, object]], where: str
) -> tuple[list[Turn], list[Problem]]:
    built: dict[int, Turn] = {}
    problems: list[Problem] = []
    expected = 0
    for turn in sorted(stored, key=lambda one: one.sequence):
        if turn.sequence > expected:
            gone = f"turn {session}.{expected}" + (f" to .{turn.sequence - 1}" if turn.sequence - expected > 1 else "")
            problems.append(Problem(where, f"session {session} has a gap before turn {turn.sequence}", gone))
        expected = turn.sequence + 1
        name = f"turn {session}.{turn.sequence}"
        parent = None if turn.parent is None else built.get(turn.parent)
        if turn.parent is not None and parent is None:
            problems.append(Problem(where, f"{name} is coded against turn {turn.parent}, which is lost", name))
            continue
        try:
            built[turn.sequence] = _turn(session, turn, parent, later.get(f"{session}.{turn.sequence}"), name)
        except DamagedTapeError as error:
            problems.append(Problem(where, str(error), name))
    return list(built.values()), problems


def _turn(session: str, stored: StoredTurn, parent: Turn | None, later: dict[str, object] | None, name: str) -> Turn:
    kept = (len(parent.tokens), len(parent.messages)) if parent else (0, 0)
    if stored.keep_tokens > kept[0] or stored.keep_messages > kept[1]:
        raise DamagedTapeError(
            f"{name} keeps {stored.keep_tokens} tokens and {stored.keep_messages} messages of a turn with {kept}"
        )
    facts = decode_record(stored.facts, TurnFacts, name)
    return Turn(
        session=session,
        sequence=stored.sequence,
        root=stored.root,
        prompt=MessageChain(stored.messages, parent.messages if parent else None, stored.keep_messages),
        prompt_tokens=TokenChain(stored.new_ids, parent.tokens if parent else None, stored.keep_tokens),
        reply=stored.reply,
        sampled_ids=stored.sampled_ids,
        logprobs=stored.logprobs,
        facts=msgspec.structs.replace(facts, **later) if later else facts,
        side=stored.side,
    )


def _facts_said_later(events: Sequence[Event]) -> dict[str, dict[str, object]]:
    """Per turn, the facts that later events revise: its delivery and its reward."""
    later: dict[str, dict[str, object]] = {}
    for event in events:
        if event.turn is None:
            continue
        if event.kind == EventKind.DELIVERY:
            later.setdefault(event.turn, {})["delivery"] = Delivery(event.data["delivery"])
        elif event.kind == EventKind.SCORE:
            later.setdefault(event.turn, {})["reward"] = event.data["reward"]
    return later


def _said_of_no_turn(head: RolloutHead, stored: Sequence[StoredSession], events: Sequence[Event]) -> list[Problem]:
    """Events about turns that were never there; a turn that is lost, and was counted, is named as lost already."""
    ends = {one.ordinal: max((turn.sequence + 1 for turn in one.turns), default=0) for one in stored}
    for event in events:
        if event.kind == EventKind.FINISH:
            for ordinal, count in enumerate(event.data.get("turns", [])):
                ends[ordinal] = max(count, ends.get(ordinal, 0))
    end_of = {session_id(*head.key, ordinal): end for ordinal, end in ends.items()}
    problems = []
    for event in events:
        if event.turn is None:
            continue
        session, _, sequence = event.turn.rpartition(".")
        if not (sequence.isascii() and sequence.isdecimal() and int(sequence) < end_of.get(session, 0)):
            what = f"its {event.kind} is of turn {event.turn}, which rollout {head.id} does not have"
            problems.append(Problem(f"event {event.sequence} of {event.writer}", what, ""))
    return problems


def _missing_at_the_end(
    head: RolloutHead, sessions: Sequence[Session], stored: Sequence[StoredSession], events: Sequence[Event], where: str
) -> list[Problem]:
    """Turns that the finish counted and that are not there after the last one that is."""
    finish = next((event for event in reversed(events) if event.kind == EventKind.FINISH), None)
    if finish is None:
        return []
    problems = []
    found = {session.ordinal: session for session in sessions}
    ends = {one.ordinal: max((turn.sequence + 1 for turn in one.turns), default=0) for one in stored}
    for ordinal, count in enumerate(finish.data.get("turns", [])):
        name = found[ordinal].id if ordinal in found else f"{head.id}.{head.try_index}.{ordinal}"
        if ordinal not in ends:
            problems.append(Problem(where, f"session {name} is missing", f"session {name} with {count} turns"))
        elif ends[ordinal] < count:
            what = f"session {name} had {count} turns when it finished, {ends[ordinal]} are found"
            problems.append(Problem(where, what, f"turn {name}.{ends[ordinal]} to .{count - 1}"))
    return problems
