"""Every fork of a tree, with its cause and its evidence."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from rolltape.records.fork import Difference, Fork, ForkCause
from rolltape.records.messages import Message, Role
from rolltape.tree.evidence import (
    drift_cause,
    is_edit_of,
    raw_difference,
    reply_change,
    text_difference,
    token_difference,
)
from rolltape.tree.latest import LatestUnder
from rolltape.tree.nodes import Node
from rolltape.tree.placement import PlacedTurn, Tree


def forks_of(tree: Tree) -> list[Fork]:
    """The turns that do not continue an earlier one, in order, each with its cause. Auxiliary calls are not forks.

    Example:

        for fork in rolltape.forks_of(rolltape.tree_of(session)):
            print(fork.turn, fork.cause)
    """
    turns = [placed for placed in tree.turns if placed.turn.facts.auxiliary is None]
    latest = LatestUnder(tree.roots.values())
    forks = []
    for index, placed in enumerate(turns):
        fork = _fork(turns, index, latest) if index else None
        if fork is not None:
            forks.append(fork)
        latest.note(placed.tip, index)
    return forks


def _fork(turns: Sequence[PlacedTurn], index: int, latest: LatestUnder) -> Fork | None:
    placed = turns[index]
    if placed.parent is not None and _is_first_continuation(placed, placed.parent):
        if placed.extends:
            return None
        cause = drift_cause(_holder(placed.parent, placed.shared_tokens).turn, placed.turn, placed.shared_tokens)
        return _explained(placed, placed.parent, cause, None, None)
    meeting: Node | None = placed.prompt_node.ancestor(placed.known_depth)
    while meeting is not None:
        reference = latest.under(meeting)
        if reference is not None:
            return _fork_at(turns, index, turns[reference], meeting)
        meeting = meeting.parent  # the messages were known from an auxiliary call alone
    return _fork_at_root(turns, index, latest)


def _holder(turn: PlacedTurn, token: int) -> PlacedTurn:
    """The turn of a conversation whose reply, or whose part of the prompt, holds this token."""
    while turn.parent is not None and token < turn.shared_tokens:
        turn = turn.parent
    return turn


def _is_first_continuation(placed: PlacedTurn, parent: PlacedTurn) -> bool:
    return next(_task_children(parent)) is placed


def _fork_at(turns: Sequence[PlacedTurn], index: int, reference: PlacedTurn, meeting: Node) -> Fork:
    placed = turns[index]
    asked = _latest_asked(meeting, placed.sequence)
    old, new = _message_below(meeting, reference.tip), _message_below(meeting, placed.prompt_node)
    text = text_difference(old, new)
    if new is None:
        cause = ForkCause.RETRY if asked else ForkCause.HISTORY_EDITED
        return _explained(placed, asked or reference, cause, None if asked else meeting.depth, None)
    if asked and new.role is Role.ASSISTANT:
        given = asked.turn.reply
        text = text_difference(given, new)
        return _explained(placed, asked, reply_change(given, new), meeting.depth, text)
    if asked and next(_task_children(asked), None) is None:
        return _explained(placed, asked, ForkCause.ABANDONED_REPLY, meeting.depth, None)
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
    if reference.tip.depth <= meeting.depth:
        return ForkCause.HISTORY_EDITED
    is_shorter = placed.prompt_node.depth < reference.prompt_node.depth
    said = {
        message.canonical for message in _messages_below(meeting, placed.prompt_node) if message.role is Role.ASSISTANT
    }
    # The left-out turns are looked through only where the new prompt holds replies at all.
    left_out = _sampled_below(meeting, reference) if said else ()
    if any(turn.turn.reply is not None and turn.turn.reply.canonical in said for turn in left_out):
        return ForkCause.COMPACTION if is_shorter else ForkCause.HISTORY_EDITED
    goes_on_later = any(child.sequence > placed.sequence for child in _task_children(reference))
    # A sub-agent that starts after another one has ended follows a turn of the agent that called it.
    if meeting.depth == 0 or goes_on_later or turns[index - 1] is not reference:
        return ForkCause.SUB_AGENT
    return ForkCause.COMPACTION if is_shorter and not is_edit_of(old, new) else ForkCause.HISTORY_EDITED


def _fork_at_root(turns: Sequence[PlacedTurn], index: int, latest: LatestUnder) -> Fork:
    """A turn under tools or template options that no earlier one had: the same conversation, or another."""
    placed = turns[index]
    node: Node | None = placed.prompt_node
    while node is not None:
        found = latest.under(node.twin) if node.twin is not None else None
        if found is not None:
            break
        node = node.parent
    reference, shared = (turns[index - 1], 0) if node is None or found is None else (turns[found], node.depth)
    if shared >= min(placed.prompt_node.depth, reference.prompt_node.depth) > 0:
        tools = raw_difference(reference.turn.root.raw.decode(), placed.turn.root.raw.decode())
        return _explained(placed, reference, ForkCause.TOOLS_CHANGED, None, tools)
    old, new = (tip.ancestor(shared + 1).message for tip in (reference.tip, placed.prompt_node))
    return _explained(placed, reference, ForkCause.SUB_AGENT, shared, text_difference(old, new))


def _latest_asked(place: Node, before: int) -> PlacedTurn | None:
    """The last turn that was sampled from a place before another."""
    index = bisect_left(place.asked, before, key=lambda turn: turn.sequence)
    earlier = (place.asked[at] for at in reversed(range(index)))
    return next((turn for turn in earlier if turn.turn.facts.auxiliary is None), None)


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


def _messages_below(meeting: Node, tip: Node) -> Iterator[Message]:
    """The messages on the way from one node to another, last one first."""
    node: Node | None = tip
    while node is not None and node.message is not None and node.depth > meeting.depth:
        yield node.message
        node = node.parent


def _sampled_below(meeting: Node, last: PlacedTurn) -> Iterator[PlacedTurn]:
    """The turns of a conversation that come after a node, latest first."""
    turn: PlacedTurn | None = last
    while turn is not None and turn.tip.depth > meeting.depth:
        yield turn
        turn = turn.parent
