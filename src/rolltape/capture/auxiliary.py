"""Requests that an agent makes on the side: recorded, and kept out of what trains."""

import re

from rolltape.capture.exchange import Ask
from rolltape.records.messages import content_text

_TITLE = re.compile(r"\btitles?\b", re.IGNORECASE)


def auxiliary_reason(ask: Ask) -> str | None:
    """What a side request is for, as its turn says; None: it is part of the task.

    Claude Code (2.1) and opencode (1.18) ask for a title of the session, without tools; Claude Code also asks for
    one token to see its quota.
    """
    if ask.tools or any(message["role"] == "assistant" for message in ask.messages):
        return None
    if ask.sampling.max_tokens == 1 and len(ask.messages) == 1 and _text(ask, "user").strip() == "quota":
        return "quota probe"
    instructions = _text(ask, "system") or _text(ask, "developer")
    if _TITLE.search(instructions) and (ask.output_schema or len(instructions) < 4000):
        return "session title"
    return None


def _text(ask: Ask, role: str) -> str:
    return "\n".join(content_text(message.get("content")) for message in ask.messages if message["role"] == role)
