"""Build messages and tools in chat form from what other APIs send, and placeholders for images, documents and audio."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rolltape.gateway.wire.fields import Fields
from rolltape.records.jsonable import parse_strict

Message = dict[str, Any]
Part = dict[str, Any]

SIGNATURE = "rolltape_"  # before the id of a reply, where an API has signatures that clients send back
_HOLDERS = ("image_url", "video_url", "input_audio", "file", "source")  # the fields of a part that hold the medium
_CONTENTS = ("url", "image_url", "file_data", "data", "file_url")
_NAMES = ("filename", "title", "file_id")
_SHOWN = 80  # characters of a name, a type or an address


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool that the model is offered; what is None is left out."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {field: value for field, value in function.items() if value is not None}}


def parse_arguments(arguments: str) -> dict[str, Any] | None:
    """The arguments of a call; None: they are no JSON object."""
    try:
        value = parse_strict(arguments)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def plain_content(parts: list[Part]) -> str | list[Part]:
    """The content of a message: a single part that is text and nothing else becomes that text."""
    return str(parts[0]["text"]) if len(parts) == 1 and parts[0].keys() == {"type", "text"} else parts


def user_messages(
    parts: Iterable[Fields], read_result: Callable[[Fields], Message | None], read_text: Callable[[Fields], Part]
) -> list[Message]:
    """A tool message for each result, and a user message for each run of other parts, in the order they came."""
    messages: list[Message] = []
    for part in parts:
        if (result := read_result(part)) is not None:
            messages.append(result)
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"].append(read_text(part))
        else:
            messages.append({"role": "user", "content": [read_text(part)]})
    return messages


def assistant_message(
    content: str | list[Part], reasoning: str, signatures: Sequence[str], **fields: list[Any]
) -> Message:
    """An assistant's message without its empty fields. A signature of ours says which reply it is."""
    ours = [one for one in signatures if one.startswith(SIGNATURE)]
    given = {
        "id": ours[0].removeprefix(SIGNATURE) if ours else None,
        "reasoning_content": reasoning,
        "thinking_signatures": [one for one in signatures if one and one not in ours],
        **fields,
    }
    return {"role": "assistant", "content": content or None} | {name: value for name, value in given.items() if value}


def media_part(part: Fields, kind: str) -> Part:
    """The text part that stands for a medium: what it is, its type and size. The medium is kept beside the text."""
    part.media.append(part.path)
    kept = kept_medium(part)
    return {"type": "text", "text": f"[{_description(kind, kept)}; this model reads text only]", "media": kept}


def kept_medium(part: Fields) -> dict[str, Any]:
    """What is recorded of a medium: all of it but the cache mark, which moves from turn to turn."""
    return {name: value for name, value in part.value.items() if value is not None and name != "cache_control"}


def _description(kind: str, part: dict[str, Any]) -> str:
    holder = next((part[name] for name in _HOLDERS if part.get(name) is not None), part)
    held: dict[str, Any] = part | holder if isinstance(holder, dict) else part
    content = next((held[name] for name in _CONTENTS if isinstance(held.get(name), str)), "")
    media_type = held.get("media_type") or held.get("format")
    name = next((held[one] for one in _NAMES if isinstance(held.get(one), str)), None)
    facts = [name]
    if content.startswith(("http:", "https:")):
        facts += [media_type, content]
    elif content:
        head, comma, data = content.partition(",") if content.startswith("data:") else ("", "", content)
        size = len(data.rstrip("=")) * 3 // 4
        facts += [head.removeprefix("data:").partition(";")[0] if comma else media_type, f"{size:,} bytes"]
    said = [one[:_SHOWN] for one in facts if isinstance(one, str) and one]
    return f"{kind}: {', '.join(said)}" if said else kind
