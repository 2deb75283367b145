"""Recognize auxiliary requests (titles, quota probes): they are recorded and do not train."""

import re

from rolltape.gateway.exchange import Ask
from rolltape.records.messages import content_text

# Of what, within the same sentence: other titles, asked for in a chat, are a task like any other.
_TITLED = r"(?:session|conversation|thread|chat)"
_TITLE = re.compile(
    rf"\btitle\b[^.]{{0,100}}\b(?:this|the|a)\b[^.]{{0,20}}\b{_TITLED}\b|\b{_TITLED} title\b", re.IGNORECASE
)
_INSTRUCTIONS = 8000  # characters: a title takes fewer words than a task
_PROBES = frozenset({"quota", "test", "Hi", "count", "."})


def auxiliary_reason(ask: Ask) -> str | None:
    """What a side request is for, as its turn says; None: it is part of the task.

    Claude Code (2.1.197) and opencode (1.18.33) ask without tools for a title of the session. Claude Code also asks
    for a single token, to see its quota or whether a key or a model is any good.
    """
    if ask.tools or any(message["role"] == "assistant" for message in ask.messages):
        return None
    if ask.sampling.max_tokens == 1 and len(ask.messages) == 1 and _text(ask, "user").strip() in _PROBES:
        return "probe"
    instructions = _text(ask, "system") or _text(ask, "developer")
    if len(instructions) < _INSTRUCTIONS and _TITLE.search(instructions):
        return "session title"
    return None


def _text(ask: Ask, role: str) -> str:
    return "\n".join(content_text(message.get("content")) for message in ask.messages if message["role"] == role)
