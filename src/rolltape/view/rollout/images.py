"""Images in messages: found in the forms that agents send, and served only with the type of their bytes.

The type that a message claims is ignored: bytes that are not PNG, JPEG, GIF or WebP are not served. SVG documents can
contain scripts, so they are not served either. An image at an address is named and never fetched.
"""

import base64
import binascii
from collections.abc import Iterator
from typing import Any, NamedTuple

_PARTS = ("content", "parts", "media", "image_url", "source", "inlineData", "inline_data")
_DATA = ("data", "url", "image_url", "file_data", "fileUri")
_DEEPEST = 6
_MOST = 64  # images of one message


class Image(NamedTuple):
    """An image of a message; `type` is None if it is not shown, and `why` is then the reason."""

    type: str | None
    content: bytes
    why: str | None = None

    def describe(self) -> dict[str, Any]:
        """The image for the page, without its bytes."""
        if self.type is None:
            return {"type": None, "bytes": len(self.content), "why": self.why}
        width, height = _size(self.type, self.content)
        return {"type": self.type, "bytes": len(self.content), "width": width, "height": height}


def find_images(message: dict[str, Any]) -> list[Image]:
    """The images of a message in order, including those that cannot be shown."""
    found: list[Image] = []
    for given in _sources(message.get("content"), 0, is_image=False):
        found.append(_read(given))
        if len(found) == _MOST:
            break
    return found


def raster_type(content: bytes) -> str | None:
    """The media type of an image by its first bytes, or None if it is not served."""
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if content.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if content.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        return "image/webp"
    return None


def _sources(value: object, depth: int, *, is_image: bool) -> Iterator[str]:
    """Yield the data or addresses of images in a content field, also from nested parts."""
    if depth > _DEEPEST:
        return
    if isinstance(value, list):
        for part in value:
            yield from _sources(part, depth + 1, is_image=is_image)
    elif isinstance(value, dict):
        kind = " ".join(str(value.get(name) or "") for name in ("type", "media_type", "mimeType", "mime_type"))
        is_image = is_image or "image" in kind or "image_url" in value
        for name in _DATA:
            if is_image and isinstance(value.get(name), str) and value[name]:
                yield value[name]
                return
        for name in _PARTS:
            if isinstance(value.get(name), (dict, list)):
                yield from _sources(value[name], depth + 1, is_image=is_image)


def _read(given: str) -> Image:
    if given.startswith(("http:", "https:", "gs:", "file:")):
        return Image(None, b"", f"it is at another address, and is not fetched: {given[:200]}")
    head, comma, data = given.partition(",") if given.startswith("data:") else ("", "", given)
    try:
        content = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return Image(None, b"", "its data is not base64")
    kind = raster_type(content)
    if kind is None:
        claimed = head.removeprefix("data:").partition(";")[0] if comma else ""
        what = f"it claims to be {claimed[:40]}" if claimed else "its type is unknown"
        return Image(None, content, f"{what}; only PNG, JPEG, GIF and WebP are shown")
    return Image(kind, content)


def _size(kind: str, content: bytes) -> tuple[int | None, int | None]:
    """Width and height in pixels, so that a page can reserve room; None if unknown."""
    if kind == "image/png" and len(content) >= 24:
        return int.from_bytes(content[16:20]), int.from_bytes(content[20:24])
    if kind == "image/gif" and len(content) >= 10:
        return int.from_bytes(content[6:8], "little"), int.from_bytes(content[8:10], "little")
    if kind == "image/jpeg":
        return _jpeg_size(content)
    return None, None


def _jpeg_size(content: bytes) -> tuple[int | None, int | None]:
    at = 2
    while at + 9 < len(content) and content[at] == 0xFF:
        marker, length = content[at + 1], int.from_bytes(content[at + 2 : at + 4])
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # a frame's header
            return int.from_bytes(content[at + 7 : at + 9]), int.from_bytes(content[at + 5 : at + 7])
        at += 2 + length
    return None, None
