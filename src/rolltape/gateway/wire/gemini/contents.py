"""Convert the contents of a Gemini request to messages in chat form.

A streamed reply comes back as several contents of the model, one per event, so successive ones become one message.
Results of functions often lack the id of their call, and are matched by name and order.
"""

import base64
import binascii
import itertools
from typing import Any

from rolltape.gateway.wire.fields import SIGNATURE, Fields, assistant_message, media_part, plain_content, user_messages
from rolltape.records.jsonable import encode_json

# The API requires an object as arguments. If a model wrote anything else, its text is sent under this name.
ARGUMENTS_AS_TEXT = "arguments_as_text"
_ROLES = ("user", "model", "function")  # `function` is `user` under an older name
_MEDIA = ("image", "audio", "video")

Messages = list[dict[str, Any]]


def sign_reply(turn_id: str) -> str:
    """The thought signature of a reply. Clients send it back, and so identify the reply."""
    return base64.b64encode(f"{SIGNATURE}{turn_id}".encode()).decode()


def read_contents(request: Fields) -> Messages:
    """`systemInstruction` as a first message, and `contents`."""
    messages: Messages = []
    system = request.maybe_object("systemInstruction")
    if system is not None:
        parts = [_text_part(part) for part in system.objects("parts")]
        messages.append({"role": "system", "content": plain_content(parts)})
    given = request.objects("contents")
    if not given:
        request.refuse("contents", "give at least one content")
    calls: list[dict[str, Any]] = []  # of the last reply, without a result yet
    for is_reply, contents in itertools.groupby(given, is_models):
        parts_of = [content.maybe_objects("parts") or [] for content in contents]
        if is_reply:
            messages.append(_assistant(list(itertools.chain.from_iterable(parts_of))))
            calls = list(messages[-1].get("tool_calls", ()))
        else:
            messages += [message for parts in parts_of for message in _user(parts, calls)]
    return messages


def is_models(content: Fields) -> bool:
    """Whether a content is the model's."""
    return content.maybe_one_of("role", *_ROLES) == "model"


def _user(parts: list[Fields], calls: list[dict[str, Any]]) -> Messages:
    read = user_messages(parts, lambda part: _tool_result(part, calls), _text_part)
    for message in read:
        message["content"] = plain_content(message["content"])
    return read or [{"role": "user", "content": ""}]


def _assistant(parts: list[Fields]) -> dict[str, Any]:
    """One message. Text, thoughts and calls each keep their order; chat form has no order between them."""
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    signatures: list[str] = []
    for part in parts:
        signatures.append(_signature(part))
        if part.get("functionCall") is not None:
            calls.append(_tool_call(part.object("functionCall")))
        elif part.maybe_flag("thought"):
            thoughts.append(part.maybe_text("text") or "")
        else:
            texts.append(_text_part(part))
    # Successive texts are one text that was streamed.
    text = texts if any(len(one) > 2 for one in texts) else "".join(one["text"] for one in texts)
    return assistant_message(text, "".join(thoughts), signatures, tool_calls=calls)


def _signature(part: Fields) -> str:
    """The signature of a part: the gateway's own decoded, any other unchanged."""
    given = part.maybe_text("thoughtSignature")
    if not given:
        return ""
    try:
        # The Python SDK (3.1) writes URL-safe base64; some clients leave the padding out.
        text = base64.urlsafe_b64decode(given.replace("+", "-").replace("/", "_") + "==").decode()
    except (binascii.Error, ValueError):
        return given
    return text if text.startswith(SIGNATURE) else given


def _tool_call(call: Fields) -> dict[str, Any]:
    name = call.name()
    args = {} if call.get("args") is None else call.object("args").value
    written = args.get(ARGUMENTS_AS_TEXT)
    is_text = isinstance(written, str) and len(args) == 1
    arguments = written if is_text else encode_json(args, call.at("args"))[0].decode()
    # The JSON path does not change while a conversation grows, so it serves as the id of a call without one.
    given = call.maybe_text("id") or f"call_{call.path}"
    return {"id": given, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_result(part: Fields, calls: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The result of one of the calls, which is removed from `calls`, or None if the part is no result."""
    if part.get("functionResponse") is None:
        return None
    result = part.object("functionResponse")
    name = result.name()
    given = result.maybe_text("id") or None
    named = (call for call in calls if (call["function"]["name"] if given is None else call["id"]) == (given or name))
    call = next(named, None)
    if call is not None:
        calls.remove(call)
    response = {} if result.get("response") is None else result.object("response").value
    # By the API's rule, `output` is the function's output and `error` its error; else all of it is the output.
    only = next(iter(response)) if len(response) == 1 else None
    output = response[only] if only in ("output", "error") else response
    text = output if isinstance(output, str) else encode_json(output, result.at("response"))[0].decode()
    media = [_text_part(part) for part in result.maybe_objects("parts") or ()]
    message = {
        "role": "tool",
        "tool_call_id": given or (f"call_{result.path}" if call is None else call["id"]),
        "content": [{"type": "text", "text": text}, *media],
    }
    return message | {"is_error": True} if only == "error" else message


def _text_part(part: Fields) -> dict[str, Any]:
    """A text part, or a placeholder for another part."""
    if len(part.value) == 1 and isinstance(part.value.get("text"), str):  # most parts
        return {"type": "text", "text": part.value["text"]}
    for name in ("inlineData", "fileData"):
        if part.get(name) is not None:
            return _medium(part, part.object(name))
    if part.get("text") is None and "thoughtSignature" not in part.value:
        unknown = ", ".join(sorted(part.unread()))
        part.refuse("text", f"known are text, inlineData, fileData and functions, not {unknown or 'an empty part'}")
    part.skip("thought", "thoughtSignature")
    return {"type": "text", "text": part.maybe_text("text") or ""} | {name: part.value[name] for name in part.unread()}


def _medium(part: Fields, data: Fields) -> dict[str, Any]:
    """The placeholder for a medium; the medium itself is kept in it unchanged."""
    kind = data.maybe_text("mimeType") or ""
    source: dict[str, Any] = {"media_type": kind}
    uri = data.maybe_text("fileUri")
    if uri is None:
        source |= {"type": "base64", "data": data.text("data")}
    else:
        source |= {"url": uri} if uri.startswith(("http:", "https:")) else {"file_id": uri}
    named = {"title": data.maybe_text("displayName"), "source": source}
    word = kind.partition("/")[0]
    return media_part(Fields(named, part.path, part), word if word in _MEDIA else "document") | {"media": part.value}
