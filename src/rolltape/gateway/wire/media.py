"""Images, documents and audio in a request: a text-only model gets a placeholder, the tape keeps what came."""

from typing import Any

from rolltape.gateway.wire.fields import Fields

_HOLDERS = ("image_url", "input_audio", "file", "source")  # the fields of a part that hold the medium
_CONTENTS = ("url", "image_url", "file_data", "data", "file_url")
_NAMES = ("filename", "title", "file_id")
_SHOWN = 80  # characters of a name, a type or an address


def media_part(part: Fields, kind: str) -> dict[str, Any]:
    """The text part that stands for a medium: what it is, its type and size. The medium is kept beside the text."""
    part.media.append(part.path)
    kept = {name: value for name, value in part.value.items() if value is not None and name != "cache_control"}
    return {"type": "text", "text": f"[{_description(kind, kept)}; this model reads text only]", "media": kept}


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
