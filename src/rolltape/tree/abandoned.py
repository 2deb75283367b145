"""Replies that were delivered and then thrown away: by asking again, or by going on without them."""

from collections.abc import Sequence

from rolltape.records.fork import Fork, ForkCause
from rolltape.tree.placement import PlacedTurn, Tree


def abandoned_turns(tree: Tree, forks: Sequence[Fork]) -> set[int]:
    """Sequence numbers of the turns that nothing goes on from, though the agent went on from their place."""
    went_on_without = {fork.departs_from for fork in forks if fork.cause is ForkCause.ABANDONED_REPLY}
    abandoned = set()
    for placed in tree.turns:
        if placed.turn.facts.auxiliary is not None or _is_continued(placed):
            continue
        asked_again = any(
            other.sequence > placed.sequence or _is_continued(other)
            for other in placed.prompt_node.asked
            if other is not placed and other.turn.facts.auxiliary is None
        )
        if asked_again or placed.turn.id in went_on_without:
            abandoned.add(placed.sequence)
    return abandoned


def _is_continued(placed: PlacedTurn) -> bool:
    """Whether a later prompt holds its reply, as it was or rewritten in its place."""
    return bool(placed.children) or any(node.rewrites is placed for node in placed.prompt_node.children.values())
