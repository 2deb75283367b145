"""Format numbers and text for people; control characters in text become visible."""

import json
import unicodedata

SHORT_ID = 8
_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def visible(text: str, keep: str = "") -> str:
    """Text that cannot steer a terminal: control and format characters become escapes, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(one if one in keep else _escaped(one) for one in text)


def quoted(text: str, limit: int = 72) -> str:
    """Text in quotes on one line, shortened."""
    shown = visible(json.dumps(text[: limit * 2], ensure_ascii=False))
    return shown if len(text) <= limit and len(shown) <= limit + 2 else f'{shown[:limit].rstrip(chr(92))}…"'


def number(value: float | None, digits: int = 4) -> str:
    """A number with few digits; None is empty text."""
    return "" if value is None else f"{value:.{digits}g}"


def count(value: int) -> str:
    return f"{value:,}"


def plural(value: int, word: str) -> str:
    return f"{value:,} {word}" if value == 1 else f"{value:,} {word}s"


def span(seconds: float) -> str:
    """A length of time in hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _escaped(character: str) -> str:
    if character == " " or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character
    return _ESCAPES.get(character, f"\\u{ord(character):04x}")
