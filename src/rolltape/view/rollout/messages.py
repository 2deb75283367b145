"""Render messages for the page: with separate text, thinking and tool calls; very long ones are cut."""

from typing import Any

from rolltape.records.messages import Message, call_parts, content_text, reasoning_text
from rolltape.view.rollout.images import find_images

LONGEST_TEXT = 200_000  # characters
_LONGEST_AGAIN = 2_000
_LONGEST_RAW = 20_000  # bytes
_SHOWN = {"role", "content", "reasoning", "reasoning_content", "tool_calls", "tool_call_id", "name", "id"}


class MessageRenderer:
    """Renders the messages of one answer. A repeated one is cut shorter, since prompts may repeat all earlier ones."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def render(self, message: Message) -> dict[str, Any]:
        """A message for the page."""
        longest = _LONGEST_AGAIN if message.digest in self._seen else LONGEST_TEXT
        self._seen.add(message.digest)
        return render_message(message, longest)


def render_message(message: Message, longest: int = LONGEST_TEXT) -> dict[str, Any]:
    """A message for the page. Its thinking, calls and results may be fields or parts of its content.

    Absent fields are left out; `raw` is set if the message contains more than is shown.
    """
    value = message.to_dict()
    shown: dict[str, Any] = {
        "role": message.role.value,
        "key": message.canonical.hex(),
        "digest": message.digest.hex(),
        "text": content_text(value.get("content")),
    }
    content, given = value.get("content"), value.get("tool_calls")
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    shown["text"] += "".join(content_text(part.get("content")) for part in parts if part.get("type") == "tool_result")
    reasoning = reasoning_text(value)
    reasoning = reasoning or "".join(part["thinking"] for part in parts if isinstance(part.get("thinking"), str))
    if reasoning:
        shown["reasoning"] = reasoning
    calls = [
        *(given if isinstance(given, list) else ()),
        *(part for part in parts if part.get("type") == "tool_use"),
    ]
    if calls:
        shown["tool_calls"] = [_render_call(call) for call in calls]
    if value.get("is_error") is True or any(part.get("is_error") is True for part in parts):
        shown["is_error"] = True
    if images := find_images(value):
        shown["images"] = [image.describe() for image in images]
    for name in ("tool_call_id", "name"):
        if isinstance(value.get(name), str):
            shown[name] = value[name]
    for name, cut in (("text", "cut"), ("reasoning", "reasoning_cut")):
        if len(shown.get(name, "")) > longest:
            shown[cut] = len(shown[name])
            shown[name] = shown[name][:longest]
    if _holds_more(value) and len(message.raw) <= _LONGEST_RAW:
        shown["raw"] = value
    return shown


def _holds_more(value: dict[str, Any]) -> bool:
    content = value.get("content")
    parts = content if isinstance(content, list) else []
    other = any(not isinstance(part, dict) or part.keys() - {"type", "text", "cache_control"} for part in parts)
    return other or bool(value.keys() - _SHOWN)


def _render_call(call: object) -> dict[str, Any]:
    if not isinstance(call, dict):
        return {"id": None, "name": str(call), "arguments": None}
    name, arguments = call_parts(call)
    if isinstance(arguments, str) and len(arguments) > LONGEST_TEXT:
        arguments = arguments[:LONGEST_TEXT] + "…"
    return {"id": call.get("id"), "name": name if isinstance(name, str) else "", "arguments": arguments}
