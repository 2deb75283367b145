"""Rollouts → conversations as messages, for supervised fine-tuning. They need no token ids."""

from collections.abc import Iterable, Iterator
from typing import Any

from rolltape.export.files import Destination, write_jsonl
from rolltape.export.schema import RowKind
from rolltape.records.rollout import Rollout
from rolltape.records.turn import Turn
from rolltape.tree import tree_of

_NOT_OURS = ("id",)  # of a message: what the gateway put there to know it again


def conversations_to_jsonl(rollouts: Iterable[Rollout], out: Destination) -> int:
    """Write every branch of every rollout as one conversation in OpenAI's chat form; how many were written.

    Example:

        rolltape.export.conversations_to_jsonl(run.rollouts(), "conversations.jsonl")
    """
    return write_jsonl((row for rollout in rollouts for row in _rows(rollout)), RowKind.CONVERSATION, out)


def _rows(rollout: Rollout) -> Iterator[dict[str, Any]]:
    about = {
        "rollout": rollout.id,
        "try_index": rollout.head.try_index,
        "task_id": rollout.head.task_id,
        "source": rollout.head.source,
        "step": rollout.head.step,
        "attempt": rollout.head.attempt,
        "model": rollout.head.model,
        "reward": rollout.reward,
    }
    for session in rollout.sessions:
        for placed in tree_of(session).turns:
            if placed.is_task and not placed.children and placed.turn.reply is not None:
                yield {**about, "turn": placed.turn.id, **_conversation(placed.turn)}


def _conversation(turn: Turn) -> dict[str, Any]:
    assert turn.reply is not None
    messages = [_plain(message) for message in (*turn.prompt_messages, turn.reply.to_dict())]
    tools = turn.root.tools
    return {"messages": messages} if not tools else {"messages": messages, "tools": tools}


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in _NOT_OURS and value is not None}
