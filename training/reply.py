"""What the model said, read back from its text."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from dataclasses import dataclass

from training.dialogue import Call, Dialogue, Message

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)

# An attempt asks for replies by yielding what the model sees, and returns its reward.
Attempt = Generator[Dialogue, "Reply", float]


@dataclass(frozen=True)
class Reply:
    """One reply; `well_formed` says that every call in it parsed and that nothing was left open."""

    content: str
    thinking: str | None
    calls: tuple[Call, ...]
    ended: bool
    well_formed: bool

    def as_message(self) -> Message:
        """The reply as the conversation's next message."""
        return Message("assistant", self.content, self.thinking, self.calls)


def read_reply(text: str, *, ended: bool) -> Reply:
    """Read what was sampled after the generation prompt, without the end-of-turn mark."""
    thinking, rest = None, text
    if "</think>" in text:
        before, rest = text.split("</think>", 1)
        thinking = before.removeprefix("<think>").strip("\n")
    found = [_call(block) for block in _CALL.findall(rest)]
    content = _CALL.sub("", rest).strip("\n")
    leftovers = any(mark in content for mark in ("<tool_call>", "</tool_call>", "<think>", "</think>"))
    return Reply(
        content=content,
        thinking=thinking,
        calls=tuple(call for call in found if call is not None),
        ended=ended,
        well_formed=not leftovers and None not in found,
    )


def last_integer(text: str) -> int | None:
    """The last whole number in a text; thousands separators are not read."""
    numbers = re.findall(r"-?\d+", text)
    return int(numbers[-1]) if numbers else None


def _call(block: str) -> Call | None:
    try:
        read = json.loads(block)
    except json.JSONDecodeError:
        return None
    if not isinstance(read, dict) or not isinstance(read.get("name"), str):
        return None
    arguments = read.get("arguments")
    return Call(read["name"], arguments) if isinstance(arguments, dict) else None
