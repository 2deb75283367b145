"""Which replies arrived, as far as anything later shows, and which were thrown away by the agent."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rolltape.records.messages import Message, Role
from rolltape.records.turn import Delivery, Finish
from rolltape.tree.evidence import is_edit_of, is_version_of
from rolltape.tree.nodes import Node, Place
from rolltape.tree.placement import PlacedTurn, Tree


class Arrivals(NamedTuple):
    """Sequence numbers of turns. Of turns that nobody has a reason to doubt, neither set says anything."""

    unproven: frozenset[int]  # nothing later shows the reply
    abandoned: frozenset[int]  # the same, and the agent asked again, or went on from its place without it


def arrivals_of(tree: Tree) -> Arrivals:
    """Look for every reply that was left, cut short or perhaps not delivered in what came later."""
    left = _left_turns(tree)
    doubtful = [
        placed
        for placed in tree.turns
        if placed.is_task and not placed.came_back and (placed.sequence in left or _is_in_doubt(placed))
    ]
    shown, edited = _shown_in_place(doubtful)
    unproven = {placed.sequence for placed in doubtful} - shown
    if unproven and not tree.tool_ids_matter:
        unproven -= _shown_by_id(tree, [placed for placed in doubtful if placed.sequence in unproven])
    return Arrivals(frozenset(unproven), frozenset((unproven & left) - edited))


def _is_in_doubt(placed: PlacedTurn) -> bool:
    facts = placed.turn.facts
    return facts.finish is Finish.ABORT or facts.delivery is not Delivery.DELIVERED


def _left_turns(tree: Tree) -> set[int]:
    """The turns whose prompt was asked again after they had ended, or whose place the agent went on from."""
    left = {placed.sequence for placed in tree.turns if placed.lost_tie}
    places: dict[Place, None] = {}
    for placed in tree.turns:
        places[placed.prompt_node] = None
        if placed.id_place is not None:
            places[placed.id_place] = None
    for place in places:
        if len(place.asked) + len(place.passed) > 1:
            left.update(_left_at(place))
    return left


def _left_at(place: Place) -> Iterable[int]:
    """The turns asked in a place that another turn, asked after they had ended, left behind there."""
    passed_at = -math.inf  # when the place was left last, by the turns looked at so far
    asked_at: dict[object, float] = {}  # when the same model was asked last
    asked = set(place.asked)
    for placed in sorted((*place.asked, *place.passed), key=lambda turn: turn.sequence, reverse=True):
        started_at, ended_at = placed.turn.facts.started_at, placed.turn.facts.ended_at
        start = math.inf if started_at is None else started_at
        if placed not in asked:
            passed_at = max(passed_at, start)
            continue
        left_at = max(passed_at, asked_at.get(placed.sampler, -math.inf))
        if left_at > -math.inf and (ended_at is None or ended_at <= left_at):
            yield placed.sequence
        asked_at[placed.sampler] = max(asked_at.get(placed.sampler, -math.inf), start)


def _shown_in_place(doubtful: Sequence[PlacedTurn]) -> tuple[set[int], set[int]]:
    """The turns that a later message in the place of their reply repeats, and those that one has something of.

    One message stands for one turn.
    """
    shown: set[int] = set()
    edited: set[int] = set()
    by_place: dict[Node, list[PlacedTurn]] = {}
    for placed in doubtful:
        by_place.setdefault(placed.prompt_node, []).append(placed)
    for place, turns in by_place.items():
        for node in place.below:
            message, since = node.message, node.since
            if message is None or since is None or message.role is not Role.ASSISTANT or node.replies:
                continue
            known = shown | edited
            latest_first = [
                placed
                for placed in reversed(turns)
                if placed.sequence < since.sequence and placed.sequence not in known and placed.had_ended(since)
            ]
            repeated = next((one for one in latest_first if is_version_of(one.turn.reply, message)), None)
            if repeated is not None:
                shown.add(repeated.sequence)
                continue
            kept = (one for one in latest_first if one.turn.reply is None or is_edit_of(one.turn.reply, message))
            edited.update(one.sequence for one in (next(kept, None),) if one)
    return shown, edited


def _shown_by_id(tree: Tree, turns: Sequence[PlacedTurn]) -> set[int]:
    """The turns of which a later prompt holds an id that the gateway gave to their reply, or to a call in it."""
    given = Counter(wire_id for placed in tree.turns if placed.turn.reply for wire_id in placed.turn.reply.wire_ids)
    wanted = {
        wire_id: placed.sequence
        for placed in turns
        if placed.turn.reply
        for wire_id in placed.turn.reply.wire_ids
        if given[wire_id] == 1
    }
    if not wanted:
        return set()
    found: set[int] = set()
    for placed in tree.turns:
        chain = placed.turn.prompt
        # What a prompt shares with an earlier turn was looked at there, but for that turn's reply.
        shared = chain.parent.own[: chain.keep - chain.parent.keep] if chain.parent else ()
        for message in (*shared, *chain.own):
            found.update(
                wanted[wire_id]
                for wire_id in _carried_ids(message)
                if wire_id in wanted and wanted[wire_id] < placed.sequence
            )
    return found


def _carried_ids(message: Message) -> frozenset[str]:
    """The ids of a message: its own, those of its calls, and that of the call that it answers."""
    if message.role is not Role.TOOL:
        return message.wire_ids
    call = message.to_dict().get("tool_call_id")
    return message.wire_ids | {call} if isinstance(call, str) else message.wire_ids
