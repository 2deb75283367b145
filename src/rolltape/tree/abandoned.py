"""Replies that were delivered and then thrown away: by asking again, or by going on without them."""

from collections.abc import Sequence

from rolltape.records.fork import Fork, ForkCause
from rolltape.tree.evidence import is_edit_of, is_version_of
from rolltape.tree.nodes import Node
from rolltape.tree.placement import PlacedTurn, Tree


def abandoned_turns(tree: Tree, forks: Sequence[Fork]) -> set[int]:
    """Sequence numbers of the turns that nothing goes on from, though the agent went on from their place."""
    went_on_without = {fork.departs_from for fork in forks if fork.cause is ForkCause.ABANDONED_REPLY}
    asked: dict[Node, list[PlacedTurn]] = {}
    for placed in tree.turns:
        if placed.turn.facts.auxiliary is None:
            asked.setdefault(placed.prompt_node, []).append(placed)
    abandoned = set()
    for twins in asked.values():
        # The agent decided when it asked again, or went on from one of the replies that it had.
        decided_at = max(twins[-1].sequence, *(twin.continued_by or 0 for twin in twins))
        for twin in twins:
            thrown_away = twin.sequence < decided_at or twin.turn.id in went_on_without
            if (twin.continued_by is None and thrown_away) or _is_replaced(twin):
                abandoned.add(twin.sequence)
    return abandoned


def _is_replaced(turn: PlacedTurn) -> bool:
    """Whether a message that has nothing of the reply took its place."""
    if turn.children or turn.rewritten_as is None:
        return False
    return not (is_version_of(turn.turn.reply, turn.rewritten_as) or is_edit_of(turn.turn.reply, turn.rewritten_as))
