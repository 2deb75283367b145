"""The line of a rollout's messages or notes that a search found, which the table shows below its row."""

import re
from collections.abc import Sequence
from itertools import chain
from typing import Any

from rolltape.records.messages import Message, Role
from rolltape.records.rollout import Note
from rolltape.tape.index.search import searched_text

_BEFORE, _LONGEST = 60, 240  # characters shown before the first match, and of the line
_NOTE = "note"
_SHARED = (Role.SYSTEM, Role.DEVELOPER)


def find_line(
    messages: Sequence[Message], patterns: Sequence[re.Pattern[str]], notes: Sequence[Note] = ()
) -> dict[str, Any] | None:
    """The line with the most terms; of several the first, with notes and system prompts last. None without a match."""
    own = ((one.role.value, searched_text(one)) for one in messages if one.role not in _SHARED)
    shared = ((one.role.value, searched_text(one)) for one in messages if one.role in _SHARED)
    best: tuple[int, str, str] | None = None
    for role, text in chain(own, ((_NOTE, note.text) for note in notes), shared):
        for line in _lines_with(text, patterns):
            terms = sum(pattern.search(line) is not None for pattern in patterns)
            if best is None or terms > best[0]:
                best = (terms, line, role)
        if best is not None and best[0] == len(patterns):
            break
    return None if best is None else {"role": best[2], "parts": _mark(best[1], patterns)}


def _lines_with(text: str, patterns: Sequence[re.Pattern[str]]) -> list[str]:
    """The lines with the first occurrence of each term. A phrase may span lines."""
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
    """A line in parts, with the found ones marked."""
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
