"""Convert the input items of a Responses request to messages; the items of one reply become one message again."""

from typing import Any

from rolltape.errors import BadRequest
from rolltape.gateway.wire.fields import Fields
from rolltape.gateway.wire.openai import custom_call_arguments, read_content
from rolltape.gateway.wire.responses_items import draft_id, joined_name, unsealed

_ROLES = ("system", "developer", "user", "assistant")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
# In the order in which the items of one reply come.
_REASONING, _TEXT, _CALL = range(3)
_OF_A_REPLY = {"reasoning": _REASONING, "function_call": _CALL, "custom_tool_call": _CALL}
_KNOWN = ("message", *_OF_A_REPLY, *_OUTPUTS)


def read_history(items: list[Fields]) -> list[dict[str, Any]]:
    """The messages that the items say, in order."""
    messages: list[dict[str, Any]] = []
    reply: _Reply | None = None
    for item in items:
        kind = item.maybe_text("type") or "message"
        place = _OF_A_REPLY.get(kind)
        if kind == "message" and item.text("role") == "assistant":
            place = _TEXT
        if place is None:
            reply = None
            messages.append(_other(item, kind))
            continue
        of = draft_id(item.maybe_text("id"))
        if reply is None or not reply.takes(place, of):
            reply = _Reply(of)
            messages.append(reply.message)
        reply.add(item, place)
    return messages


class _Reply:
    """An assistant's message that is put together from items."""

    def __init__(self, draft: str | None) -> None:
        self.message: dict[str, Any] = {"role": "assistant", "content": None}
        if draft is not None:
            self.message["id"] = draft
        self._draft = draft
        self._places: list[int] = []

    def takes(self, place: int, draft: str | None) -> bool:
        """Whether an item belongs here: by its id, and where there is none by the order within a reply."""
        if draft is not None and self._draft is not None:
            return draft == self._draft and (place == _CALL or place not in self._places)
        return place > self._places[-1] or place == self._places[-1] != _TEXT

    def add(self, item: Fields, place: int) -> None:
        self._places.append(place)
        if place == _REASONING:
            self._add_reasoning(item)
        elif place == _CALL:
            self.message.setdefault("tool_calls", []).append(_call(item))
        else:
            self.message["content"] = _content(item, "content")
            item.skip("type", "role", "status", "id")
            if self._draft is None and (given := item.maybe_text("id")) is not None:
                self.message["id"] = given
            self.message |= {name: item.value[name] for name in item.unread()}

    def _add_reasoning(self, item: Fields) -> None:
        text = _reasoning(item)
        if text is None:
            # Another server's secret: the model cannot read it, and it is kept as it came.
            self.message["encrypted_content"] = item.maybe_text("encrypted_content")
            return
        before = self.message.get("reasoning_content")
        self.message["reasoning_content"] = text if before is None else f"{before}\n{text}"


def _reasoning(item: Fields) -> str | None:
    """A reasoning item's text, in the fullest form that came back; None: it is encrypted alone."""
    texts = [part.text("text") for part in item.maybe_objects("content") or ()]
    if texts:
        return "\n".join(texts)
    if (sealed := item.maybe_text("encrypted_content")) is not None and (text := unsealed(sealed)) is not None:
        return text
    summaries = [part.text("text") for part in item.maybe_objects("summary") or ()]
    return None if sealed is not None and not summaries else "\n".join(summaries)


def _call(item: Fields) -> dict[str, Any]:
    custom = item.text("type") == "custom_tool_call"
    function = {
        "name": joined_name(item.maybe_text("namespace"), item.name()),
        "arguments": custom_call_arguments(item.text("input")) if custom else item.text("arguments"),
    }
    return {"id": item.text("call_id"), "type": "function", "function": function}


def _other(item: Fields, kind: str) -> dict[str, Any]:
    if kind in _OUTPUTS:
        item.skip("type", "status")
        message = {"role": "tool", "tool_call_id": item.text("call_id"), "content": _needed_content(item, "output")}
    elif kind == "message":
        item.skip("type", "status")
        if (role := item.text("role")) not in _ROLES:
            item.refuse("role", f"known are {', '.join(_ROLES)}")
        message = {"role": role, "content": _needed_content(item, "content")}
    elif kind == "item_reference":
        raise BadRequest(f"{item.path} refers to a stored item, and nothing is stored here; send the item itself")
    else:
        item.refuse("type", f"known are {', '.join(_KNOWN)}")
    return message | {name: item.value[name] for name in item.unread()}


def _needed_content(item: Fields, name: str) -> str | list[dict[str, Any]]:
    content = _content(item, name)
    return item.refuse(name, "give a text, or a list of text parts") if content is None else content


def _content(item: Fields, name: str) -> str | list[dict[str, Any]] | None:
    """Content in chat form; a single part that is text and nothing else is given as that text."""
    content = read_content(item, name, "input_text", "output_text", "text")
    if isinstance(content, list) and len(content) == 1 and content[0].keys() == {"type", "text"}:
        text: str = content[0]["text"]
        return text
    return content
