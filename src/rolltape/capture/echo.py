"""What clients change in a reply when they send it back, known in this one place.

Claude Code (2.1) and Codex over Responses (0.166) bring back all of it: text, thinking, and arguments that differ
in spacing alone, which the canonical form does not see. Clients of Chat Completions drop reasoning, which that API
has no field for. Codex over Chat (0.29) also sends the tool calls first, then their results, then the text.
"""

import enum
from typing import Any

from rolltape.records.messages import Message, canonical_message


class EchoRule(enum.StrEnum):
    """How an echo departs from the reply that it stands for."""

    REASONING_DROPPED = "reasoning_dropped"
    TEXT_APART = "text_apart"  # the calls alone; the text follows their results as a message of its own


def rule_of(echo: Message, reply: Message) -> EchoRule | None:
    """The rule by which a message is an echo of a reply that it does not equal; None: it is something else."""
    sent = canonical_message(echo.to_dict())
    meant = canonical_message(reply.to_dict())
    if "reasoning_content" in sent:
        return None
    meant.pop("reasoning_content", None)
    if sent == meant:
        return EchoRule.REASONING_DROPPED
    if "tool_calls" in meant and "content" in meant and "content" not in sent:
        del meant["content"]
        return EchoRule.TEXT_APART if sent == meant else None
    return None


def is_text_of(message: Message, reply: Message) -> bool:
    """Whether an assistant's message is nothing but the text of a reply."""
    sent = canonical_message(message.to_dict())
    return sent == _text_alone(canonical_message(reply.to_dict()))


def _text_alone(meaning: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in meaning.items() if key in ("role", "content")}
