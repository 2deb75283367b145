"""What a message says: in a line, or part by part."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rolltape.records.messages import content_text
from rolltape.records.wording import quoted, visible

_LONGEST_CALL = 48


def said(message: Mapping[str, Any]) -> str:
    """A message in brief: its thinking, its text, its calls."""
    text, calls = content_text(message.get("content")), message.get("tool_calls")
    reasoning = _reasoning(message)
    parts = [f"(thinks {quoted(reasoning, 32)})"] if reasoning else []
    if text or not calls:
        parts.append(quoted(text))
    parts.extend(visible(call_text(call, _LONGEST_CALL)) for call in calls or () if isinstance(call, dict))
    return " ".join(parts)


def message_parts(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A message whole, each part after what it is: `thinks`, the role that speaks, `calls`, `holds` what is no text."""
    reasoning = _reasoning(message)
    content, calls = message.get("content"), message.get("tool_calls")
    text = content_text(content)
    if reasoning:
        yield "thinks", reasoning
    if text or not calls:
        yield str(message.get("role", "message")), text
    for call in calls if isinstance(calls, list) else ():
        yield "calls", call_text(call)
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and "text" not in part:
            yield "holds", str(part.get("type", "something"))


def call_text(call: object, longest: int | None = None) -> str:
    """A tool call as it would be typed, its arguments cut at so many characters."""
    if not isinstance(call, dict):
        return str(call)
    function = call.get("function")
    source = function if isinstance(function, dict) else call
    arguments = source.get("arguments")
    spelled = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    cut = longest is not None and len(spelled) > longest
    return f"{str(source.get('name'))[:longest]}({spelled[:longest]}{'…' if cut else ''})"


def _reasoning(message: Mapping[str, Any]) -> str:
    return content_text(message.get("reasoning_content") or message.get("reasoning"))
