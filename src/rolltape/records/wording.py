"""Formats numbers, text and messages for people; control characters in text become visible."""

import json
import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rolltape.records.messages import call_parts, content_text, message_calls, reasoning_text

SHORT_ID = 8
_MAX_CALL_CHARS = 48
_WRITTEN_OUT = 10_000_000
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


def number(value: float | None) -> str:
    """A number with four significant digits and without zeros at its end. None is empty text.

    Below ten million all digits before the point are kept. The page writes numbers by the same rule, in format.ts.
    """
    if value is None:
        return ""
    shown = f"{value:.4g}"
    return f"{value:,.0f}" if 10_000 <= abs(float(shown)) < _WRITTEN_OUT else shown


def count(value: int) -> str:
    return f"{value:,}"


def plural(value: int, word: str) -> str:
    return f"{value:,} {word}" if value == 1 else f"{value:,} {word}s"


def reward_facts(rewards: Iterable[float | None]) -> list[str]:
    """The mean of rewards in words. Those that are not finite are counted, not averaged."""
    known = [reward for reward in rewards if reward is not None]
    finite = [reward for reward in known if math.isfinite(reward)]
    facts = [f"mean reward {number(math.fsum(finite) / len(finite))}"] if finite else []
    return facts + ([f"{plural(len(known) - len(finite), 'reward')} not finite"] if len(finite) < len(known) else [])


def token_fact(sampled: Iterable[int | None]) -> str:
    """How many tokens were sampled, from the numbers of rollouts; None is one whose token ids are not known."""
    counts = list(sampled)
    known = [one for one in counts if one is not None]
    return plural(sum(known), "sampled token") if known or not counts else "no token ids"


def span(seconds: float) -> str:
    """A length of time in hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _escaped(character: str) -> str:
    if character == " " or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character
    return _ESCAPES.get(character, f"\\u{ord(character):04x}")


def message_line(message: Mapping[str, Any]) -> str:
    """A message on one line, shortened: its thinking, its text, its calls."""
    text, calls = content_text(message.get("content")), message.get("tool_calls")
    reasoning = reasoning_text(message)
    parts = [f"(thinks {quoted(reasoning, 32)})"] if reasoning else []
    if text or not calls:
        parts.append(quoted(text))
    parts.extend(visible(call_text(call, _MAX_CALL_CHARS)) for call in message_calls(message))
    return " ".join(parts)


def message_parts(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The parts of a message with their kinds: `thinks`, its role (for its text), `calls`, and `holds` for the rest."""
    reasoning = reasoning_text(message)
    content, calls = message.get("content"), message.get("tool_calls")
    text = content_text(content)
    if reasoning:
        yield "thinks", reasoning
    if text or not calls:
        yield str(message.get("role", "message")), text
    for call in calls if isinstance(calls, list) else ():
        yield "calls", call_text(call)
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and "text" not in part:
            yield "holds", str(part.get("type", "something"))


def call_text(call: object, max_chars: int | None = None) -> str:
    """A tool call as it would be typed, its arguments cut at `max_chars` characters."""
    if not isinstance(call, dict):
        return str(call)
    name, arguments = call_parts(call)
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    cut = max_chars is not None and len(text) > max_chars
    return f"{str(name)[:max_chars]}({text[:max_chars]}{'…' if cut else ''})"
