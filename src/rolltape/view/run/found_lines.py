"""The line of a rollout's messages that a search found: what the table shows under its row."""

import re
from collections.abc import Sequence
from typing import Any

from rolltape.records.messages import Message, Role
from rolltape.tape.index.search import searched_text

_BEFORE, _LONGEST = 60, 240  # characters shown before the first match, and of the line
_SHARED = (Role.SYSTEM, Role.DEVELOPER)


def find_line(messages: Sequence[Message], patterns: Sequence[re.Pattern[str]]) -> dict[str, Any] | None:
    """The line in which most terms occur, of several the first; system prompts come last. None: there is none."""
    best: tuple[int, str, Role] | None = None
    for message in sorted(messages, key=lambda one: one.role in _SHARED):
        text = searched_text(message)
        for line in _lines_with(text, patterns):
            terms = sum(pattern.search(line) is not None for pattern in patterns)
            if best is None or terms > best[0]:
                best = (terms, line, message.role)
        if best is not None and best[0] == len(patterns):
            break
    return None if best is None else {"role": best[2].value, "parts": _mark(best[1], patterns)}


def _lines_with(text: str, patterns: Sequence[re.Pattern[str]]) -> list[str]:
    """The lines in which each term first occurs. A phrase may reach over the end of a line."""
    found = []
    for pattern in patterns:
        if match := pattern.search(text):
            start = text.rfind("\n", 0, match.start()) + 1
            end = text.find("\n", match.end())
            line = text[start : len(text) if end < 0 else end]
            at = match.start() - start
            if at > _BEFORE * 2:
                line = "…" + line[at - _BEFORE :]
            found.append(line[: _LONGEST * 4].strip())
    return found


def _mark(line: str, patterns: Sequence[re.Pattern[str]]) -> list[dict[str, Any]]:
    """A line in parts, those that were asked for marked."""
    spans = sorted(match.span() for pattern in patterns for match in pattern.finditer(line))
    cut = max(0, spans[0][0] - _BEFORE) if spans and len(line) > _LONGEST else 0
    end = min(len(line), cut + _LONGEST)
    parts: list[dict[str, Any]] = [{"text": "…", "found": False}] if cut else []
    at = cut
    for start, stop in spans:
        if start < at or stop > end:
            continue
        parts += [{"text": line[at:start], "found": False}, {"text": line[start:stop], "found": True}]
        at = stop
    parts.append({"text": line[at:end] + ("…" if end < len(line) else ""), "found": False})
    return [part for part in parts if part["text"]]
