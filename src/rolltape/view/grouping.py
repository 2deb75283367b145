"""All attempts at one task side by side."""

from collections.abc import Sequence
from typing import Any

from rolltape.records.messages import Message
from rolltape.records.rollout import Rollout
from rolltape.traces.branch import main_branch
from rolltape.view.messages import shown_message


def conversation_of(rollout: Rollout) -> list[Message]:
    """The messages of a rollout's main branch: that of its session with the most turns, the first of equals."""
    session = max(rollout.sessions, key=lambda one: (len(one.turns), -one.ordinal), default=None)
    branch = [] if session is None else main_branch(session)
    return branch[-1].messages.to_list() if branch else []


def group_of(group: str, attempts: Sequence[tuple[dict[str, Any], Rollout]]) -> dict[str, Any]:
    """The attempts, each a row of the table with its messages, and how many of these all of them begin with."""
    conversations = [conversation_of(rollout) for _, rollout in attempts]
    first = attempts[0][1].head
    return {
        "group": group,
        "task": first.task_id,
        "step": first.step,
        "task_data": first.task,
        "rollouts": [
            {**row, "messages": [shown_message(message) for message in conversation]}
            for (row, _), conversation in zip(attempts, conversations, strict=True)
        ],
        "common_prefix": _common([[message.canonical for message in one] for one in conversations]),
    }


def _common(conversations: Sequence[Sequence[bytes]]) -> int:
    shared = 0
    for messages in zip(*conversations, strict=False):
        if len(set(messages)) > 1:
            break
        shared += 1
    return shared
