"""Recognize auxiliary requests (titles, quota probes, memory extraction): they are recorded and do not train."""

import re

from rolltape.gateway.request import ChatRequest
from rolltape.records.messages import content_text

# Of what, within the same sentence: other titles, asked for in a chat, are a task like any other.
_TITLED = r"(?:session|conversation|thread|chat)"
_TITLE = re.compile(
    rf"\btitle\b[^.]{{0,100}}\b(?:this|the|a)\b[^.]{{0,20}}\b{_TITLED}\b|\b{_TITLED} title\b", re.IGNORECASE
)
_MEMORY = re.compile(
    r"\bmemory (?:extraction|consolidation|dream)\b|\b(?:extract|consolidate)\b[^.]{0,40}\bmemor(?:y|ies)\b",
    re.IGNORECASE,
)
_OPENING = 300  # characters of a system prompt, which say whose it is
_INSTRUCTIONS = 8000  # characters: a title takes fewer words than a task
_PROBES = frozenset({"quota", "test", "Hi", "count", "."})


def auxiliary_reason(ask: ChatRequest, task_instructions: str | None) -> str | None:
    """What a side request is for, as its turn says; None: it is part of the task.

    Claude Code (2.1.197) and opencode (1.18.33) ask without tools for a title of the session. Claude Code also asks
    for a single token, to see its quota or whether a key or a model is any good. qwen-code (0.15.10) has another
    agent, with tools and the conversation so far, keep what is worth remembering; a session that begins with such
    instructions (`task_instructions`) has that as its task.
    """
    instructions = instructions_of(ask)
    is_aside = task_instructions is not None and instructions != task_instructions
    if is_aside and _MEMORY.search(instructions[:_OPENING]):
        return "memory extraction"
    if ask.tools or any(message["role"] == "assistant" for message in ask.messages):
        return None
    if ask.sampling.max_tokens == 1 and len(ask.messages) == 1 and _text(ask, "user").strip() in _PROBES:
        return "probe"
    if len(instructions) < _INSTRUCTIONS and _TITLE.search(instructions):
        return "session title"
    return None


def instructions_of(ask: ChatRequest) -> str:
    """The text of a request's system messages."""
    return _text(ask, "system") or _text(ask, "developer")


def _text(ask: ChatRequest, role: str) -> str:
    return "\n".join(content_text(message.get("content")) for message in ask.messages if message["role"] == role)
