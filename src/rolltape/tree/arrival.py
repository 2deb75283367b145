"""Which replies arrived, as far as anything later shows, and which were thrown away by the agent."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import islice
from typing import NamedTuple

from rolltape.records.messages import Message, Role
from rolltape.records.turn import Delivery, Finish, Turn
from rolltape.tree.evidence import is_edit_of, spellings
from rolltape.tree.placement import PlacedTurn, Sampler, Tree
from rolltape.tree.places import Node, SharedPrefix

_MOST_EDITED = 16  # replies to one prompt that are compared with a message which may be an edited one of them


class Arrivals(NamedTuple):
    """Sequence numbers of turns. Of turns that nobody has a reason to doubt, neither set says anything."""

    unproven: frozenset[int]  # nothing later shows the reply
    abandoned: frozenset[int]  # the same, and the agent asked again, or went on from its place without it
    # Of unproven turns that were cut short, or perhaps not delivered: how many of their first ids a later prompt shows.
    heads: Mapping[int, int]


def arrivals_of(tree: Tree) -> Arrivals:
    """Look for every reply that was left, cut short or perhaps not delivered in what came later."""
    left = _left_turns(tree)
    doubtful = [
        placed
        for placed in tree.turns
        if placed.is_task and not placed.came_back and (placed.sequence in left or is_in_doubt(placed.turn))
    ]
    shown, edited = _shown_in_place(doubtful)
    unproven = {placed.sequence for placed in doubtful} - shown
    if unproven and not tree.tool_ids_matter:
        unproven -= _shown_by_id(tree, [placed for placed in doubtful if placed.sequence in unproven])
    in_doubt = {one.sequence: one.turn for one in doubtful if one.sequence in unproven and is_in_doubt(one.turn)}
    heads = _shown_in_part(tree, in_doubt)
    return Arrivals(frozenset(unproven), frozenset((unproven & left) - edited - heads.keys()), heads)


def is_in_doubt(turn: Turn) -> bool:
    """Whether a reply was cut short, or perhaps not delivered: it counts as far as something later shows it."""
    return turn.facts.finish is Finish.ABORT or turn.facts.delivery is not Delivery.DELIVERED


def _left_turns(tree: Tree) -> set[int]:
    """The turns whose prompt was asked again, or gone on from without them, after they had ended."""
    places: dict[SharedPrefix, None] = {}
    repeats: dict[SharedPrefix, None] = {}
    for placed in tree.turns:
        places[placed.prompt_node] = None
        if placed.id_place is not None:
            places[placed.id_place] = None
        if placed.reply_place is not None and len(placed.reply_place.replies) > 1:
            repeats[placed.reply_place] = None
    left: set[int] = set()
    for place in places:
        if len(place.asked) + len(place.passed) > 1:
            by_sampler: dict[Sampler, list[PlacedTurn]] = {}
            for placed in place.asked:
                by_sampler.setdefault(placed.sampler, []).append(placed)
            for asked in by_sampler.values():
                left.update(_left_by([*place.passed, *asked], asked))
    for place in repeats:
        # Of turns with the same ids one is continued.
        left.update(_left_by([one for placed in place.replies for one in placed.continuations], place.replies))
    return left


def _left_by(others: Sequence[PlacedTurn], turns: Sequence[PlacedTurn]) -> Iterator[int]:
    """Those of the turns that had ended when a later one of the others was asked."""
    own, leaving, left_at = set(turns), set(others), -math.inf  # the latest time, by those looked at so far
    for placed in sorted(own | leaving, key=lambda turn: turn.sequence, reverse=True):
        started_at, ended_at = placed.turn.facts.started_at, placed.turn.facts.ended_at
        if placed in own and left_at > -math.inf and (ended_at is None or ended_at <= left_at):
            yield placed.sequence
        if placed in leaving:
            left_at = math.inf if started_at is None else max(left_at, started_at)


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
        echoes = [node for node in place.below if _is_foreign_reply(node)]
        by_spelling: dict[bytes, list[PlacedTurn]] = {}
        for placed in turns if echoes else ():
            for spelling in spellings(placed.turn.reply) if placed.turn.reply else ():
                by_spelling.setdefault(spelling, []).append(placed)
        for node in echoes:
            message, since = node.message, node.since
            if message is None or since is None:
                continue
            equals = [_latest(by_spelling.get(one, ()), since, shown) for one in spellings(message, as_echo=True)]
            repeated = max((one.sequence for found in equals for one in found), default=None)
            if repeated is not None:
                shown.add(repeated)
                continue
            others = _latest(turns, since, shown | edited, _MOST_EDITED)
            kept = (one for one in others if one.turn.reply is None or is_edit_of(one.turn.reply, message))
            edited.update(one.sequence for one in islice(kept, 1))
    return shown, edited


def _shown_in_part(tree: Tree, doubtful: Mapping[int, Turn]) -> dict[int, int]:
    """How many of the first ids of some turns later prompts show: in their own ids, or in messages, by the gateway."""
    heads: dict[int, int] = {}
    for placed in tree.turns:
        shown = []
        if (cut := placed.head_of) is not None:
            shown.append((cut.sequence, placed.head_tokens - len(cut.turn.prompt_tokens)))
        if (part := placed.turn.echoed_part) is not None and part[0] < placed.sequence:
            shown.append(part)
        for sequence, count in shown:
            if sequence in doubtful and 0 < count <= len(doubtful[sequence].sampled_ids):
                heads[sequence] = max(count, heads.get(sequence, 0))
    return heads


def _is_foreign_reply(node: Node) -> bool:
    return node.message is not None and node.message.role is Role.ASSISTANT and not node.replies


def _latest(turns: Sequence[PlacedTurn], since: Turn, known: Set[int], most: int = 1) -> list[PlacedTurn]:
    """The latest of some turns, in order, that had ended when another was asked and are not known yet."""
    before = turns[: bisect_left(turns, since.sequence, key=lambda one: one.sequence)]
    ended = (one for one in reversed(before) if one.sequence not in known and one.had_ended(since, shown=True))
    return list(islice(ended, most))


def _shown_by_id(tree: Tree, turns: Sequence[PlacedTurn]) -> set[int]:
    """The turns of which a later prompt holds an id that the gateway gave to their reply, or to a call in it.

    A client that hung up may have the id of a reply with a part of it. It has that of a call with all that came before.
    """
    given = Counter(wire_id for placed in tree.turns if placed.turn.reply for wire_id in placed.turn.reply.wire_ids)
    wanted = {
        wire_id: placed.sequence
        for placed in turns
        if placed.turn.reply
        for wire_id in placed.turn.reply.wire_ids
        - ({_own_id(placed.turn.reply)} if is_in_doubt(placed.turn) else set())
        if given[wire_id] == 1
    }
    if not wanted:
        return set()
    found: set[int] = set()
    seen: set[int] = set()  # the identities of chains; the turns keep them alive
    for placed in tree.turns:
        chain = placed.turn.prompt
        # What a prompt shares with an earlier turn was looked at there, but for that turn's reply.
        is_new = chain.parent is not None and id(chain.parent) not in seen
        shared = chain.parent.own[: chain.keep - chain.parent.keep] if chain.parent and is_new else ()
        seen.update((id(chain), id(chain.parent)))
        for message in (*shared, *chain.own):
            found.update(
                wanted[wire_id]
                for wire_id in _carried_ids(message)
                if wire_id in wanted and wanted[wire_id] < placed.sequence
            )
    return found


def _own_id(message: Message) -> object:
    return message.to_dict().get("id")


def _carried_ids(message: Message) -> frozenset[str]:
    """The ids of a message: its own, those of its calls, and that of the call that it answers."""
    if message.role is not Role.TOOL:
        return message.wire_ids
    call = message.to_dict().get("tool_call_id")
    return message.wire_ids | {call} if isinstance(call, str) else message.wire_ids
