"""Convert the conversation of a Messages API request to chat form.

Cache marks are left out: they are for Anthropic's own cache, and move each turn, so that every message would be stored
once with a mark and once without.
"""

from collections.abc import Callable
from typing import Any

from rolltape.gateway.wire.fields import Fields
from rolltape.records.jsonable import encode_json

_SIGNATURE = "rolltape_"
_UNSUPPORTED = {"image": "images are not supported yet", "document": "documents are not supported yet"}

Messages = list[dict[str, Any]]


def signature_of(reply_id: str) -> str:
    """The signature of a reply's thinking: an echo brings it back, and so says which reply it is."""
    return _SIGNATURE + reply_id


def conversation(request: Fields) -> Messages:
    """`system` as a first message, and `messages`."""
    read: Messages = []
    if request.get("system") is not None:
        read.append({"role": "system", "content": _texts(request, "system")})
    given = request.objects("messages")
    if not given:
        request.refuse("messages", "give at least one message")
    for message in given:
        role = message.maybe_one_of("role", *_READERS) or message.refuse("role", "give user, assistant or system")
        read += _READERS[role](message)
    return read


def _system(message: Fields) -> Messages:
    return [{"role": "system", "content": _texts(message, "content")}]


def _user(message: Fields) -> Messages:
    """A tool message for each result, and a user message for each stretch of text, in the order they came."""
    content = _content(message, "content")
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    read: Messages = []
    for block in content:
        if block.get("type") == "tool_result":
            read.append(_tool_result(block))
        elif read and read[-1]["role"] == "user":
            read[-1]["content"].append(_text_part(block))
        else:
            read.append({"role": "user", "content": [_text_part(block)]})
    return read or [{"role": "user", "content": []}]


def _assistant(message: Fields) -> Messages:
    """One message. Text, thinking and calls each keep their order; chat form has none among them."""
    content = _content(message, "content")
    if isinstance(content, str):
        return [{"role": "assistant", "content": content}]
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thinking: list[str] = []
    signatures: list[str] = []
    redacted: list[str] = []
    for block in content:
        match block.get("type"):
            case "thinking":
                thinking.append(block.text("thinking"))
                signatures.append(block.maybe_text("signature") or "")
            case "redacted_thinking":
                redacted.append(block.text("data"))
            case "tool_use":
                calls.append(_tool_call(block))
            case _:
                texts.append(_text_part(block))
    ours = [signature for signature in signatures if signature.startswith(_SIGNATURE)]
    others = [signature for signature in signatures if signature and signature not in ours]
    fields = {
        "id": ours[0].removeprefix(_SIGNATURE) if ours else None,
        "reasoning_content": "\n\n".join(filter(None, thinking)),
        "thinking_signatures": others,
        "redacted_thinking": redacted,
        "tool_calls": calls,
    }
    text = texts[0]["text"] if len(texts) == 1 and texts[0].keys() == {"type", "text"} else texts
    return [{"role": "assistant", "content": text or None} | {key: value for key, value in fields.items() if value}]


_READERS: dict[str, Callable[[Fields], Messages]] = {"user": _user, "assistant": _assistant, "system": _system}


def _tool_call(block: Fields) -> dict[str, Any]:
    given = block.get("input")
    if given is None and "input" not in block.value:  # a null is the echo of arguments that were one
        block.refuse("input", "give an object")
    # A text is the echo of arguments that were no JSON.
    arguments = given if isinstance(given, str) else encode_json(given, block.at("input"))[0].decode()
    return {"id": block.name("id"), "type": "function", "function": {"name": block.name(), "arguments": arguments}}


def _tool_result(block: Fields) -> dict[str, Any]:
    # A tool that gives nothing back may leave its content out.
    content = "" if block.get("content") is None else _texts(block, "content")
    message = {"role": "tool", "tool_call_id": block.name("tool_use_id"), "content": content}
    return message | {"is_error": True} if block.maybe_flag("is_error") else message


def _texts(fields: Fields, name: str) -> str | list[dict[str, Any]]:
    """A text, or text parts."""
    content = _content(fields, name)
    return content if isinstance(content, str) else [_text_part(block) for block in content]


def _content(fields: Fields, name: str) -> str | list[Fields]:
    value = fields.get(name)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        fields.refuse(name, "give a text or a list of blocks")
    return fields.objects(name)


def _text_part(block: Fields) -> dict[str, Any]:
    kind = block.name("type")
    if kind != "text":
        block.refuse("type", _UNSUPPORTED.get(kind, "blocks of this type are not supported here"))
    block.text("text")
    return {key: value for key, value in block.value.items() if value is not None and key != "cache_control"}
