"""Content of both OpenAI APIs: a text, or a list of parts, of which only texts can be put into a prompt."""

from typing import Any

from rolltape.errors import BadRequest
from rolltape.gateway.wire.fields import Fields

_MEDIA = {"image": "images are", "audio": "audio is", "file": "files are"}
_EMPTY_ON_REPLIES = ("annotations", "logprobs")


def read_content(holder: Fields, name: str, *text_kinds: str) -> str | list[dict[str, Any]] | None:
    """A text, or parts in chat form; what else is in a part is kept. A refusal is the text that it is."""
    content = holder.get(name)
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        holder.refuse(name, "give a text, or a list of text parts")
    return [_part(part, text_kinds) for part in holder.objects(name)]


def _part(part: Fields, text_kinds: tuple[str, ...]) -> dict[str, Any]:
    kind = part.text("type")
    if kind == "refusal":
        text = part.text("refusal")
    elif kind in text_kinds:
        text = part.text("text")
    else:
        raise _no_text(part, kind, text_kinds)
    part.skip(*(name for name in _EMPTY_ON_REPLIES if part.value.get(name) == []))
    return {"type": "text", "text": text} | {name: part.value[name] for name in part.unread()}


def _no_text(part: Fields, kind: str, text_kinds: tuple[str, ...]) -> BadRequest:
    for medium, are in _MEDIA.items():
        if medium in kind:
            return BadRequest(f"{part.path}: {are} not supported yet; send text alone")
    return BadRequest(f"{part.at('type')} is {kind[:80]!r}; known are {', '.join(text_kinds)}, refusal")
