"""Read the messages of a Chat Completions request; they are checked, and kept as they came where possible."""

from typing import Any

from rolltape.gateway.wire.fields import Fields
from rolltape.gateway.wire.openai import custom_call_arguments, read_content
from rolltape.records.jsonable import encode_json

_ROLES = ("system", "developer", "user", "assistant", "tool")
_PLAIN_ROLES = frozenset({"system", "developer", "user", "assistant"})


def read_messages(body: Fields) -> list[dict[str, Any]]:
    """All messages of a body, in chat form."""
    given = body.get("messages")
    if not isinstance(given, list):
        body.refuse("messages", "give a list of objects")
    if not given:
        body.refuse("messages", "give at least one")
    return [
        # Most messages of a long history are no more than a role and a text.
        message if _is_plain(message) else read_message(Fields(message, f"messages[{index}]"))
        for index, message in enumerate(given)
    ]


def _is_plain(message: object) -> bool:
    return (
        type(message) is dict
        and len(message) == 2
        and type(message.get("content")) is str
        and type(message.get("role")) is str
        and message["role"] in _PLAIN_ROLES
    )


def read_message(message: Fields) -> dict[str, Any]:
    """One message in chat form; fields that are not known are kept."""
    role = message.text("role")
    if role == "function":
        message.refuse("role", "functions were replaced by tools; send tool_calls and tool messages")
    if role not in _ROLES:
        message.refuse("role", f"known are {', '.join(_ROLES)}")
    read: dict[str, Any] = {"role": role, "content": read_content(message, "content", "text")}
    if role == "assistant":
        read |= _assistant_fields(message)
    elif read["content"] is None:
        message.refuse("content", "give a text, or a list of text parts")
    if role == "tool":
        read["tool_call_id"] = message.text("tool_call_id")
    return read | {name: message.value[name] for name in message.unread()}


def _assistant_fields(message: Fields) -> dict[str, Any]:
    for name in ("function_call", "audio"):
        if message.get(name) is not None:
            message.refuse(name, "leave it out: it cannot be put into a prompt")
    read: dict[str, Any] = {}
    # vLLM's newer servers and some clients say `reasoning`.
    reasoning = message.maybe_text("reasoning_content") or message.maybe_text("reasoning")
    if reasoning is not None:
        read["reasoning_content"] = reasoning
    if calls := message.maybe_objects("tool_calls"):
        read["tool_calls"] = [_call(call) for call in calls]
    return read


def _call(call: Fields) -> dict[str, Any]:
    kind = call.maybe_one_of("type", "function", "custom") or "function"
    if kind == "custom":
        custom = call.object("custom")
        function = {"name": custom.name(), "arguments": custom_call_arguments(custom.text("input"))}
    else:
        given = call.object("function")
        function = {"name": given.name(), "arguments": _arguments(given)}
    return {"id": call.text("id"), "type": "function", "function": function}


def _arguments(function: Fields) -> str:
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        return encode_json(arguments, function.at("arguments"))[0].decode()
    return "" if arguments is None else function.text("arguments")
