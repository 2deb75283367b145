"""Which replies arrived at the agent, as later turns show, and which ones the agent abandoned."""

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

_MOST_EDITED = 16  # how many replies to one prompt are compared with a message that may be an edited copy


class Arrivals(NamedTuple):
    """Sequence numbers of turns. Turns that nothing puts in doubt are in neither set."""

    unproven: frozenset[int]  # nothing later shows the reply
    abandoned: frozenset[int]  # unproven, and the agent asked again or continued without the reply
    # For unproven turns that were cut short or perhaps not delivered: how many of their first ids a later prompt shows.
    heads: Mapping[int, int]


def arrivals_of(tree: Tree) -> Arrivals:
    """Look in later turns for every reply that was left, cut short, or perhaps not delivered."""
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
    """Whether a reply was cut short, or perhaps not delivered. Only the part of it that later turns show counts."""
    return turn.facts.finish is Finish.ABORT or turn.facts.delivery is not Delivery.DELIVERED


def _left_turns(tree: Tree) -> set[int]:
    """The turns whose prompt was sent again, or was continued without their reply, after they had ended."""
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
        # A prompt that continues several turns with the same ids is linked to only one of them.
        left.update(_left_by([one for placed in place.replies for one in placed.continuations], place.replies))
    return left


def _left_by(others: Sequence[PlacedTurn], turns: Sequence[PlacedTurn]) -> Iterator[int]:
    """Yield the turns that had ended when a later one of `others` was requested."""
    own, leaving, left_at = set(turns), set(others), -math.inf  # the latest start among the turns visited so far
    for placed in sorted(own | leaving, key=lambda turn: turn.sequence, reverse=True):
        started_at, ended_at = placed.turn.facts.started_at, placed.turn.facts.ended_at
        if placed in own and left_at > -math.inf and (ended_at is None or ended_at <= left_at):
            yield placed.sequence
        if placed in leaving:
            left_at = math.inf if started_at is None else max(left_at, started_at)


def _shown_in_place(doubtful: Sequence[PlacedTurn]) -> tuple[set[int], set[int]]:
    """The turns whose reply a later message in its place repeats, and those whose reply it repeats in part.

    Each message counts for one turn only.
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
    """For each doubtful turn, how many of its first ids later prompts show, by ids or by messages."""
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
    """The latest turns, last one first, that had ended when `since` was requested and are not in `known`."""
    before = turns[: bisect_left(turns, since.sequence, key=lambda one: one.sequence)]
    ended = (one for one in reversed(before) if one.sequence not in known and one.had_ended(since, shown=True))
    return list(islice(ended, most))


def _shown_by_id(tree: Tree, turns: Sequence[PlacedTurn]) -> set[int]:
    """The turns whose reply is shown by a later prompt with an id that the gateway gave the reply or a call in it.

    For a turn in doubt, the reply's own id proves nothing: a client that hung up may have it with a part of the reply.
    The id of a call proves all that came before the call.
    """
    given = Counter(wire_id for placed in tree.turns if placed.turn.reply for wire_id in placed.turn.reply.wire_ids)
    wanted = {
        wire_id: placed.sequence
        for placed in turns
        if placed.turn.reply
        for wire_id in placed.turn.reply.wire_ids
        - ({placed.turn.reply.to_dict().get("id")} if is_in_doubt(placed.turn) else set())
        if given[wire_id] == 1
    }
    if not wanted:
        return set()
    found: set[int] = set()
    seen: set[int] = set()  # the identities of chains; the turns keep them alive
    for placed in tree.turns:
        chain = placed.turn.prompt
        # Messages that a prompt shares with an earlier turn were checked at that turn, except that turn's reply.
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


def _carried_ids(message: Message) -> frozenset[str]:
    """The ids of a message: its own, those of its calls, and that of the call that it answers."""
    if message.role is not Role.TOOL:
        return message.wire_ids
    call = message.to_dict().get("tool_call_id")
    return message.wire_ids | {call} if isinstance(call, str) else message.wire_ids
