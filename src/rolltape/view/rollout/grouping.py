"""The answer about a group: all attempts at one task side by side, each as one conversation."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from rolltape.records.fork import ForkCause
from rolltape.records.messages import Message
from rolltape.records.rollout import Rollout
from rolltape.traces.build import main_branch
from rolltape.tree import PlacedTurn, forks_of, tree_of
from rolltape.view.rollout.messages import render_message


class OrderedMessages(NamedTuple):
    """The messages of a rollout in reading order, and the indexes at which history was replaced."""

    messages: list[Message]
    compacted_at: set[int]


def read_conversation(rollout: Rollout) -> OrderedMessages:
    """The main branch of the session with the most turns; messages that a compaction removed come first."""
    session = max(rollout.sessions, key=lambda one: (len(one.turns), -one.ordinal), default=None)
    branch = [] if session is None else main_branch(session)
    if session is None or not branch:
        return OrderedMessages([], set())
    tree = tree_of(session)
    placed = {one.turn.id: one for one in tree.turns}
    compactions = {one.turn: one for one in forks_of(tree) if one.cause is ForkCause.COMPACTION}
    parts: list[list[Message]] = []
    at: PlacedTurn | None = placed[branch[-1].id]
    end = branch[-1]
    while at is not None:
        fork = compactions.get(at.turn.id)
        if fork is None:
            at = at.parent
            continue
        parts.append(end.messages.to_list()[fork.message_index or 0 :])
        at = placed[fork.departs_from]
        end = at.turn
    parts.append(end.messages.to_list())
    parts.reverse()
    starts = list(accumulate(len(part) for part in parts))[:-1]
    return OrderedMessages([message for part in parts for message in part], set(starts))


def build_group(group: str, attempts: Sequence[tuple[dict[str, Any], Rollout]]) -> dict[str, Any]:
    """The attempts, each as a row of the table with its messages."""
    first = attempts[0][1].head
    return {
        "group": group,
        "task": first.task_id,
        "step": first.step,
        "task_data": first.task,
        "rollouts": [{**row, "messages": render_conversation(read_conversation(rollout))} for row, rollout in attempts],
    }


def render_conversation(conversation: OrderedMessages) -> list[dict[str, Any]]:
    """Messages for the page."""
    after = {"after": ForkCause.COMPACTION.value}
    return [
        render_message(message) | (after if index in conversation.compacted_at else {})
        for index, message in enumerate(conversation.messages)
    ]
