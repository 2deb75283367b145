"""Convert messages from the form that agents send to the form that renderers take."""

from collections.abc import Sequence
from typing import Any

import msgspec

from rolltape.errors import BadRequest
from rolltape.gateway.prompts.families import Chat
from rolltape.gateway.prompts.tokenizer import FolderTokenizer
from rolltape.records.jsonable import parse_strict
from rolltape.records.messages import Role, content_text

_REMINDER = "<system-reminder>\n{}\n</system-reminder>"


class Prepared(msgspec.Struct, frozen=True):
    """Messages ready for a renderer, and what was done to them."""

    messages: Chat
    places: list[int]  # of each message that came: where it is among these
    special_text: int  # special tokens spelled out in user and tool text
    folded: int  # system messages that became part of another


def prepared(messages: Sequence[dict[str, Any]], tokenizer: FolderTokenizer, *, fold: bool, opening: bool) -> Prepared:
    """Plain text contents, arguments as objects, `developer` as `system`.

    `fold`: the renderer takes a system message only as the first one; `opening`: these begin the conversation.
    """
    plain: Chat = []
    special_text = 0
    for index, message in enumerate(messages):
        one, count = _plain_message(message, tokenizer, f"message {index}")
        plain.append(one)
        special_text += count
    if not fold:
        return Prepared(plain, list(range(len(plain))), special_text, 0)
    merged, places, folded = _folded(plain, opening)
    return Prepared(merged, places, special_text, folded)


def _plain_message(message: dict[str, Any], tokenizer: FolderTokenizer, where: str) -> tuple[dict[str, Any], int]:
    role = message.get("role")
    text = _text(message.get("content"), where)
    match role:
        case Role.SYSTEM | Role.DEVELOPER:
            return {"role": "system", "content": text}, 0
        case Role.USER:
            text, count = tokenizer.guard(text)
            return {"role": "user", "content": text}, count
        case Role.TOOL:
            text, count = tokenizer.guard(text)
            named = {key: message[key] for key in ("tool_call_id", "name") if isinstance(message.get(key), str)}
            return {"role": "tool", "content": text, **named}, count
        case Role.ASSISTANT:
            plain: dict[str, Any] = {"role": "assistant", "content": text}
            if reasoning := content_text(message.get("reasoning_content") or message.get("reasoning")):
                plain["reasoning_content"] = reasoning
            if calls := message.get("tool_calls"):
                plain["tool_calls"] = [_plain_call(call, where) for call in calls]
            return plain, 0
    raise BadRequest(f"{where} has the role {role!r}; known are {', '.join(Role)}")


def _text(content: object, where: str) -> str:
    if isinstance(content, list):
        for part in content:
            if not (isinstance(part, str) or (isinstance(part, dict) and isinstance(part.get("text"), str))):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise BadRequest(f"{where} has a part of the type {kind!r}; only text can be rendered")
    elif content is not None and not isinstance(content, str):
        raise BadRequest(f"{where} has a {type(content).__name__} as its content; give a text or text parts")
    return content_text(content)


def _plain_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(name, str):
        raise BadRequest(f"{where} has a tool call without a function's name")
    plain: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": _arguments(function.get("arguments"))},
    }
    return {"id": call["id"], **plain} if isinstance(call.get("id"), str) else plain


def _arguments(given: object) -> object:
    """Arguments as an object, which each family spells its own way; what is no object stays the text that it is."""
    if not isinstance(given, str):
        return {} if given is None else given
    if not given.strip():
        return {}
    try:
        value = parse_strict(given)
    except (ValueError, RecursionError):
        return given
    return value if isinstance(value, dict) else given


def _folded(messages: Chat, opening: bool) -> tuple[Chat, list[int], int]:
    """Leading system messages become one; later ones become reminders, part of a neighboring user message if any."""
    out: Chat = []
    places: list[int] = []
    folded = 0
    after_reminder = False
    for message in messages:
        is_system = message["role"] == "system"
        leading = is_system and opening and (not out or (len(out) == 1 and out[0]["role"] == "system"))
        is_reminder = is_system and not leading
        if is_reminder:
            message = {"role": "user", "content": _REMINDER.format(message["content"])}
        beside_user = message["role"] == "user" and bool(out) and out[-1]["role"] == "user"
        if (leading and out) or (beside_user and (is_reminder or after_reminder)):
            out[-1] = {**out[-1], "content": f"{out[-1]['content']}\n\n{message['content']}"}
            folded += is_system
        else:
            out.append(message)
            folded += is_reminder
        places.append(len(out) - 1)
        after_reminder = is_reminder
    return out, places, folded
