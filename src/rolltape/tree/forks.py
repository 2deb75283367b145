"""Every fork of a tree, with its cause and its evidence."""

from collections.abc import Iterator, Sequence

from rolltape.records.fork import Difference, Fork, ForkCause
from rolltape.records.messages import Message, Role
from rolltape.tree.evidence import drift_cause, is_edit_of, reply_change, text_difference, token_difference
from rolltape.tree.nodes import Node
from rolltape.tree.placement import PlacedTurn, Tree


def forks_of(tree: Tree) -> list[Fork]:
    """The turns that do not simply go on from an earlier one, in order. Auxiliary calls are no forks."""
    turns = [placed for placed in tree.turns if placed.turn.facts.auxiliary is None]
    forks = (_fork(turns, index) for index in range(1, len(turns)))
    return [fork for fork in forks if fork is not None]


def _fork(turns: Sequence[PlacedTurn], index: int) -> Fork | None:
    placed = turns[index]
    if placed.parent is not None and _is_first_continuation(placed, placed.parent):
        if placed.extends:
            return None
        cause = drift_cause(placed.parent.turn, placed.turn, placed.shared_tokens)
        return _explained(placed, placed.parent, cause, None, None)
    reference, meeting = _reference(turns, index)
    if reference is None or meeting is None:
        return _fork_at_root(turns, index)
    return _fork_at(turns, index, reference, meeting)


def _is_first_continuation(placed: PlacedTurn, parent: PlacedTurn) -> bool:
    return next(_task_children(parent)) is placed


def _reference(turns: Sequence[PlacedTurn], index: int) -> tuple[PlacedTurn | None, Node | None]:
    """The latest earlier turn that shares most of this turn's conversation, and the node where they part."""
    placed = turns[index]
    meeting: Node | None = placed.prompt_node.ancestor(placed.known_depth)
    while meeting is not None:
        for earlier in reversed(range(index)):
            if turns[earlier].tip.is_under(meeting):
                return turns[earlier], meeting
        # The messages were known from an auxiliary call alone.
        meeting = meeting.parent
    return None, None


def _fork_at(turns: Sequence[PlacedTurn], index: int, reference: PlacedTurn, meeting: Node) -> Fork:
    placed = turns[index]
    asked = [turn for turn in meeting.asked if turn.sequence < placed.sequence and turn.turn.facts.auxiliary is None]
    old, new = _message_below(meeting, reference.tip), _message_below(meeting, placed.prompt_node)
    text = text_difference(old, new)
    if new is None:
        cause = ForkCause.RETRY if asked else ForkCause.HISTORY_EDITED
        return _explained(placed, asked[-1] if asked else reference, cause, None if asked else meeting.depth, None)
    if asked and new.role is Role.ASSISTANT:
        given = asked[-1].turn.reply
        text = text_difference(given, new)
        return _explained(placed, asked[-1], reply_change(given, new), meeting.depth, text)
    if asked and next(_task_children(asked[-1]), None) is None:
        return _explained(placed, asked[-1], ForkCause.ABANDONED_REPLY, meeting.depth, None)
    cause = _history_cause(turns, index, reference, meeting, old, new)
    return _explained(placed, reference, cause, meeting.depth, text)


def _history_cause(
    turns: Sequence[PlacedTurn],
    index: int,
    reference: PlacedTurn,
    meeting: Node,
    old: Message | None,
    new: Message,
) -> ForkCause:
    """Why a message that the model did not write is another one than before."""
    placed = turns[index]
    left_out = list(_sampled_below(meeting, reference))
    if not left_out:
        return ForkCause.HISTORY_EDITED
    is_shorter = placed.prompt_node.depth < reference.prompt_node.depth
    kept = {node.message.canonical for node in _nodes_below(meeting, placed.prompt_node) if node.message}
    if any(turn.turn.reply is not None and turn.turn.reply.canonical in kept for turn in left_out):
        return ForkCause.COMPACTION if is_shorter else ForkCause.HISTORY_EDITED
    goes_on_later = any(child.sequence > placed.sequence for child in _task_children(reference))
    # A sub-agent that starts after another one has ended follows a turn of the agent that called it.
    if meeting.depth == 0 or goes_on_later or turns[index - 1] is not reference:
        return ForkCause.SUB_AGENT
    return ForkCause.COMPACTION if is_shorter and not is_edit_of(old, new) else ForkCause.HISTORY_EDITED


def _fork_at_root(turns: Sequence[PlacedTurn], index: int) -> Fork:
    """A turn under tools or template options that no earlier one had: the same conversation, or another."""
    placed = turns[index]
    own = list(_nodes_below(None, placed.prompt_node))
    latest_by_root: dict[Node, PlacedTurn] = {turn.tip.ancestor(0): turn for turn in turns[:index]}
    best, shared = turns[index - 1], -1
    for candidate in sorted(latest_by_root.values(), key=lambda turn: -turn.sequence):
        agree = _leading_agreement(own, list(_nodes_below(None, candidate.tip)))
        if agree > shared:
            best, shared = candidate, agree
    if shared >= min(len(own), best.prompt_node.depth) > 0:
        before, after = best.turn.root.raw.decode(), placed.turn.root.raw.decode()
        at = next(
            (i for i, (x, y) in enumerate(zip(before, after, strict=False)) if x != y), min(len(before), len(after))
        )
        text = Difference(at, before[at : at + 80], after[at : at + 80])
        return _explained(placed, best, ForkCause.TOOLS_CHANGED, None, text)
    old, new = best.tip.ancestor(shared + 1).message, own[shared].message if shared < len(own) else None
    return _explained(placed, best, ForkCause.SUB_AGENT, shared, text_difference(old, new))


def _explained(
    placed: PlacedTurn, departs_from: PlacedTurn, cause: ForkCause, message_index: int | None, text: Difference | None
) -> Fork:
    return Fork(
        turn=placed.turn.id,
        departs_from=departs_from.turn.id,
        cause=cause,
        message_index=message_index,
        text=text,
        tokens=token_difference(departs_from.turn, placed.turn),
    )


def _task_children(placed: PlacedTurn) -> Iterator[PlacedTurn]:
    return (child for child in placed.children if child.turn.facts.auxiliary is None)


def _message_below(meeting: Node, tip: Node) -> Message | None:
    """The next message on the way from one node to another; None: they are the same."""
    return None if tip is meeting else tip.ancestor(meeting.depth + 1).message


def _nodes_below(meeting: Node | None, tip: Node) -> list[Node]:
    depth = meeting.depth if meeting else 0
    nodes = []
    node: Node | None = tip
    while node is not None and node.depth > depth:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]


def _sampled_below(meeting: Node, last: PlacedTurn) -> Iterator[PlacedTurn]:
    """The turns of a conversation that come after a node, latest first."""
    turn: PlacedTurn | None = last
    while turn is not None and turn.tip.depth > meeting.depth:
        yield turn
        turn = turn.parent


def _leading_agreement(left: Sequence[Node], right: Sequence[Node]) -> int:
    agree = 0
    for one, other in zip(left, right, strict=False):
        if one.message is None or other.message is None or one.message.canonical != other.message.canonical:
            break
        agree += 1
    return agree
