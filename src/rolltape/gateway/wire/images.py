"""Images of a conversation in OpenAI's form, for a hosted endpoint."""

from collections.abc import Iterable, Mapping
from typing import Any


def image_part(part: Mapping[str, Any]) -> dict[str, Any] | None:
    """The image that a placeholder stands for, as Chat Completions has it; None for other parts and media."""
    kept = part.get("media")
    if not isinstance(kept, Mapping):
        return None
    url = _url(kept)
    if url is None:
        return None
    detail = {"detail": kept["detail"]} if isinstance(kept.get("detail"), str) else {}
    return {"type": "image_url", "image_url": {"url": url, **detail}}


def count_images(messages: Iterable[Mapping[str, Any]]) -> int:
    """How many images a hosted endpoint gets: those of user messages, since results of tools are text."""
    contents = (message.get("content") for message in messages if message["role"] == "user")
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return sum(image_part(part) is not None for part in parts)


def _url(kept: Mapping[str, Any]) -> str | None:
    """The address of an image, or its content as an address, in the forms of Responses, Messages and Gemini."""
    for medium in (kept, kept.get("source"), kept.get("inlineData"), kept.get("fileData")):
        if not isinstance(medium, Mapping):
            continue
        kind = medium.get("media_type") or medium.get("mimeType") or kept.get("type") or ""
        data = medium.get("data")
        url = medium.get("image_url") or medium.get("url") or medium.get("fileUri")
        if "image" not in kind:
            continue
        if isinstance(data, str) and data:
            return f"data:{kind};base64,{data}"
        if isinstance(url, str) and url.startswith(("http:", "https:", "data:")):
            return url
    return None
