"""Every fork of a tree, with its cause and its evidence."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import msgspec

from rolltape.records.fork import Difference, Fork, ForkCause
from rolltape.records.messages import Message, Role
from rolltape.tree.evidence import (
    drift_cause,
    is_edit_of,
    raw_difference,
    repeats_lines,
    reply_change,
    text_difference,
    token_difference,
)
from rolltape.tree.placement import PlacedTurn, Tree
from rolltape.tree.places import Node, SharedPrefix

_RECENT = 8  # how many earlier turns are searched for the summary that a prompt holds
_WHILE_COMPACTING = frozenset(
    {
        ForkCause.COMPACTION,
        ForkCause.HISTORY_EDITED,
        ForkCause.SUB_AGENT,
        ForkCause.TOOLS_CHANGED,
        ForkCause.ABANDONED_REPLY,
    }
)
_MOST_ASKED = 64  # how many turns of one prompt are searched for the reply that a later prompt departs from


def forks_of(tree: Tree) -> list[Fork]:
    """Return the turns that do not simply continue an earlier one, each with its cause. Auxiliary calls are not forks.

    Example:

        for fork in rolltape.forks_of(rolltape.tree_of(session)):
            print(fork.turn, fork.cause)
    """
    turns = [placed for placed in tree.turns if placed.is_task]
    departing = [index and not _goes_on(placed) for index, placed in enumerate(turns)]
    if not any(departing):
        return []
    latest = LatestUnder(tree.roots.values())
    forks: dict[str, Fork] = {}
    for index, placed in enumerate(turns):
        fork = _fork(turns, index, latest) if departing[index] else None
        if fork is not None:
            forks[fork.turn] = fork
            summary = _summary_used(turns, index, fork)
            if summary is not None:
                forks[fork.turn] = _compaction(placed, summary, fork)
                # The request for the summary is part of the compaction, whatever else it changed.
                request = forks.get(summary.turn.id)
                if request is not None and request.cause in _WHILE_COMPACTING:
                    forks[request.turn] = msgspec.structs.replace(request, cause=ForkCause.COMPACTION)
        if placed.prompt_node.depth:
            latest.note(placed.tip, index)
    return list(forks.values())


def _summary_used(turns: Sequence[PlacedTurn], index: int, fork: Fork) -> PlacedTurn | None:
    """The recent turn whose reply replaces history in this turn's prompt, or None.

    Agents send a summary back inside a message of their own.
    """
    placed = turns[index]
    if fork.cause not in _WHILE_COMPACTING or not fork.message_index or not placed.prompt_node.depth:
        return None
    recent = turns[max(0, index - _RECENT) : index]
    if len(placed.turn.prompt_tokens) >= max(len(one.turn.prompt_tokens) for one in recent):
        return None
    texts = [
        message.text
        for message in _messages_below(placed.prompt_node.ancestor(fork.message_index), placed.prompt_node)
        if message.role not in (Role.ASSISTANT, Role.TOOL)
    ]
    for one in reversed(recent):
        is_over = not any(child.is_task and child.sequence > placed.sequence for child in one.children)
        if is_over and one.turn.reply is not None and any(repeats_lines(one.turn.reply, text) for text in texts):
            return one
    return None


def _compaction(placed: PlacedTurn, summary: PlacedTurn, fork: Fork) -> Fork:
    """The fork of a turn that continues from a summary. It departs from the turn that wrote the summary."""
    shared = min(fork.message_index or 0, summary.prompt_node.depth)
    old, new = (_message_below(tip.ancestor(shared), tip) for tip in (summary.prompt_node, placed.prompt_node))
    return _explained(placed, summary, ForkCause.COMPACTION, shared, text_difference(old, new))


def _goes_on(placed: PlacedTurn) -> bool:
    """Whether this turn is the first to continue another. If the other sampled nothing, an equal prompt is a retry."""
    before = placed.continues
    if before is None or len(placed.turn.prompt_tokens) == len(before.turn.prompt_tokens):
        return False
    return before.first_continuation is placed


def _fork(turns: Sequence[PlacedTurn], index: int, latest: "LatestUnder") -> Fork | None:
    placed = turns[index]
    if not placed.prompt_node.depth:
        return _fork_without_messages(turns, index)
    echoed = placed.message_parent
    if echoed is not None and echoed is not placed.continues and echoed.first_echo is placed:
        if placed.id_place is None or echoed.id_place is None:
            return None
        if placed.sampler != echoed.sampler:
            return _explained(placed, echoed, ForkCause.SUB_AGENT, None, None)
        shared = echoed.turn.tokens.common_prefix(placed.turn.prompt_tokens)
        return _explained(placed, echoed, drift_cause(_holder(echoed, shared).turn, placed.turn, shared), None, None)
    meeting = placed.prompt_node.ancestor(placed.known_depth)
    reference = latest.under(meeting)
    while reference is None and meeting.parent is not None:
        meeting = meeting.parent  # the messages were known from an auxiliary call alone
        reference = latest.under(meeting)
    twin = _twin_below(meeting, placed.prompt_node, latest)
    if twin is not None or reference is None:
        return _fork_under_other_tools(turns, index, twin)
    return _fork_at(turns, index, turns[reference], meeting)


def _fork_without_messages(turns: Sequence[PlacedTurn], index: int) -> Fork:
    """The fork of a turn without messages. Its cause follows from where its ids leave those of an earlier turn."""
    placed = turns[index]
    place, before = placed.asked_place, placed.continues
    if place is None:
        return _explained(placed, turns[index - 1], ForkCause.SUB_AGENT, None, None)
    asked = place.asked[: _index_before(place.asked, placed)]
    if place is placed.id_place:
        return _explained(placed, asked[-1], _asked_again(asked[-1], placed), None, None)
    if before is not None and before.id_place is place:
        others = before.continuations[: _index_before(before.continuations, placed)]
        latest = next(one for one in reversed(others) if one.is_task)
        return _explained(placed, latest, ForkCause.HISTORY_EDITED, None, None)
    shared = [(one.turn.tokens.common_prefix(placed.turn.prompt_tokens), one) for one in asked[-_MOST_ASKED:]]
    longest, departs_from = max(shared, key=lambda one: one[0])
    cause = ForkCause.RETOKENIZED if longest > place.length else ForkCause.ABANDONED_REPLY
    return _explained(placed, departs_from, cause, None, None)


def _asked_again(asked: PlacedTurn, placed: PlacedTurn) -> ForkCause:
    return ForkCause.RETRY if asked.had_ended(placed.turn) else ForkCause.SIBLING


def _holder(turn: PlacedTurn, token: int) -> PlacedTurn:
    """The turn of a conversation whose reply, or whose part of the prompt, holds this token."""
    while turn.parent is not None and token < turn.shared_tokens:
        turn = turn.parent
    return turn


def _fork_at(turns: Sequence[PlacedTurn], index: int, reference: PlacedTurn, meeting: Node) -> Fork:
    placed = turns[index]
    asked = _latest_asked(meeting, placed)
    old, new = _message_below(meeting, reference.tip), _message_below(meeting, placed.prompt_node)
    text = text_difference(old, new)
    if new is None:
        cause = _asked_again(asked, placed) if asked else ForkCause.HISTORY_EDITED
        return _explained(placed, asked or reference, cause, None if asked else meeting.depth, None)
    if asked and new.role is Role.ASSISTANT:
        given = asked.turn.reply
        text = text_difference(given, new)
        return _explained(placed, asked, reply_change(given, new), meeting.depth, text)
    if asked and not (asked.first_continuation or asked.first_echo):
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
    """The cause of a fork at a message that the model did not write."""
    placed = turns[index]
    if reference.tip.depth <= meeting.depth:
        return ForkCause.HISTORY_EDITED
    is_shorter = placed.prompt_node.depth < reference.prompt_node.depth
    if _repeats(placed, reference, meeting.depth):
        return ForkCause.COMPACTION if is_shorter else ForkCause.HISTORY_EDITED
    goes_on_later = any(child.is_task and child.sequence > placed.sequence for child in reference.children)
    # A second sub-agent follows a turn of the agent that called it, not the last turn of the first sub-agent.
    if meeting.depth == 0 or goes_on_later or turns[index - 1] is not reference:
        return ForkCause.SUB_AGENT
    return ForkCause.COMPACTION if is_shorter and not is_edit_of(old, new) else ForkCause.HISTORY_EDITED


def _twin_below(meeting: Node, tip: Node, latest: "LatestUnder") -> tuple[int, int] | None:
    """Return the latest turn under other tools or template options that shares messages below `meeting`, and how many
    it shares, or None."""
    node = tip
    while node.depth > meeting.depth:
        twin = latest.twin(node)
        found = latest.under(twin) if twin is not None else None
        if found is not None:
            return found, node.depth
        assert node.parent is not None
        node = node.parent
    return None


def _fork_under_other_tools(turns: Sequence[PlacedTurn], index: int, twin: tuple[int, int] | None) -> Fork:
    """The fork of a turn that the conversations under its own tools and template options do not explain: the same
    conversation under other tools, or another conversation."""
    placed = turns[index]
    found, shared = (index - 1, 0) if twin is None else twin
    reference = turns[found]
    if shared >= min(placed.prompt_node.depth, reference.prompt_node.depth) > 0 or _repeats(placed, reference, shared):
        tools = raw_difference(reference.turn.root.raw.decode(), placed.turn.root.raw.decode())
        message_index = shared if shared < reference.prompt_node.depth else None
        return _explained(placed, reference, ForkCause.TOOLS_CHANGED, message_index, tools)
    old, new = (tip.ancestor(shared + 1).message for tip in (reference.tip, placed.prompt_node))
    return _explained(placed, reference, ForkCause.SUB_AGENT, shared, text_difference(old, new))


def _repeats(placed: PlacedTurn, reference: PlacedTurn, shared: int) -> bool:
    """Whether the prompt holds a reply of the reference's conversation from after the first `shared` messages."""
    below = placed.prompt_node.ancestor(shared)
    replies = {one.canonical for one in _messages_below(below, placed.prompt_node) if one.role is Role.ASSISTANT}
    if not replies:
        return False
    turn: PlacedTurn | None = reference
    while turn is not None and turn.tip.depth > shared:
        if turn.turn.reply is not None and turn.turn.reply.canonical in replies:
            return True
        turn = turn.message_parent
    return False


def _latest_asked(place: SharedPrefix, placed: PlacedTurn) -> PlacedTurn | None:
    """The last turn before `placed` whose prompt ends at this place."""
    index = _index_before(place.asked, placed)
    return place.asked[index - 1] if index else None


def _index_before(turns: Sequence[PlacedTurn], placed: PlacedTurn) -> int:
    """How many of the turns, which are in order, came before `placed`."""
    return bisect_left(turns, placed.sequence, key=lambda turn: turn.sequence)


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


def _message_below(meeting: Node, tip: Node) -> Message | None:
    """The next message on the way from one node to another, or None if they are the same."""
    return None if tip is meeting else tip.ancestor(meeting.depth + 1).message


def _messages_below(meeting: Node, tip: Node) -> Iterator[Message]:
    """The messages on the way from one node to another, last one first."""
    node: Node | None = tip
    while node is not None and node.message is not None and node.depth > meeting.depth:
        yield node.message
        node = node.parent


class LatestUnder:
    """Finds the latest turn whose conversation passes through a node, in logarithmic time. Turns are noted in order."""

    def __init__(self, roots: Iterable[Node]) -> None:
        # Nodes are numbered depth first, so the nodes below a node have one range of numbers.
        self._first: dict[Node, int] = {}
        self._end: dict[Node, int] = {}
        stack = [(root, False) for root in roots]
        while stack:
            node, is_left = stack.pop()
            if is_left:
                self._end[node] = len(self._first)
                continue
            self._first[node] = len(self._first)
            stack.append((node, True))
            stack.extend((child, False) for child in node.below)
        # A segment tree in an array: each entry holds the latest turn of the two entries below it.
        self._size = len(self._first)
        self._latest = [-1] * (2 * self._size)

    def twin(self, node: Node) -> Node | None:
        """The node of the same conversation under other tools that was made last before this one, or None."""
        alike = self._alike.get(node.conversation, ())
        index = bisect_left(alike, _made(node), key=_made)
        return alike[index - 1] if index else None

    @cached_property
    def _alike(self) -> dict[bytes, list[Node]]:
        """The nodes of each conversation, in the order in which they were made."""
        found: dict[bytes, list[Node]] = {}
        for node in sorted((node for node in self._first if node.depth), key=_made):
            found.setdefault(node.conversation, []).append(node)
        return found

    def note(self, node: Node, turn: int) -> None:
        """Note that a turn, later than all before, ends at this node."""
        place = self._first[node] + self._size
        while place:
            self._latest[place] = turn
            place //= 2

    def under(self, node: Node) -> int | None:
        """The latest turn noted at or below the node, or None."""
        left, right = self._first[node] + self._size, self._end[node] + self._size
        latest = -1
        while left < right:
            if left % 2:
                latest = max(latest, self._latest[left])
                left += 1
            if right % 2:
                right -= 1
                latest = max(latest, self._latest[right])
            left //= 2
            right //= 2
        return None if latest < 0 else latest


def _made(node: Node) -> int:
    return node.since.sequence if node.since else -1
