"""What differs: between two messages as people read them, and between two sequences of ids."""

import re
from typing import Any

import numpy as np

from rolltape.records.fork import Difference, ForkCause
from rolltape.records.jsonable import canonical_json
from rolltape.records.messages import Message, canonical_message, content_text
from rolltape.records.turn import Turn
from rolltape.records.wording import call_text

_THINKING_DROPPED = "new_user_message"  # the gateway's reason to render a prompt in full: the template drops thinking
_EXCERPT_CHARACTERS = 80
_EXCERPT_TOKENS = 12
_OPENING = 8  # tokens that open an assistant's message and its thinking, at most
_REPEATED_LINE, _REPEATED = 24, 40  # characters: of a line too long to match by chance, and of all matching lines
_THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)


def reply_change(before: Message | None, after: Message) -> ForkCause:
    """How a reply was changed when it came back."""
    if before is None:
        return ForkCause.REPLY_REWRITTEN
    old, new = canonical_message(before.to_dict()), canonical_message(after.to_dict())
    if _without_space(old) == _without_space(new):
        return ForkCause.REPLY_WHITESPACE
    if _has_thinking(old) and _without_space(_without_thinking(old)) == _without_space(_without_thinking(new)):
        return ForkCause.THINKING_STRIPPED
    return ForkCause.REPLY_REWRITTEN


def spellings(message: Message, *, as_echo: bool = False) -> list[bytes]:
    """Keys to compare by: a reply and a message share one if the message repeats the whole reply.

    White space does not count. The message, given with `as_echo`, may lack the thinking.
    """
    value = canonical_message(message.to_dict())
    found = [_without_space(value)]
    if as_echo or _has_thinking(value):
        found.append(b"without thinking" + _without_space(_without_thinking(value)))
    return found


def drift_cause(before: Turn, after: Turn, shared: int) -> ForkCause:
    """Why ids differ although the messages are equal: the template left out thinking, or text was tokenized anew."""
    if after.prefix_miss == _THINKING_DROPPED:
        return ForkCause.THINKING_STRIPPED
    reply = before.reply
    start = len(before.prompt_tokens)
    # A template may open the thinking within the prompt. A reply with empty thinking has no text of it, but its marks.
    if reply is None or not start - _OPENING <= shared < len(before.tokens):
        return ForkCause.RETOKENIZED
    if shared > start + _OPENING and not (reply.reasoning or "<think>" in reply.text):
        return ForkCause.RETOKENIZED
    # Stripped thinking is a deletion: the rest of the reply follows directly at the first id that differs.
    held = before.tokens.slice(shared)
    now = after.prompt_tokens.slice(shared, shared + len(held))
    for cut in np.flatnonzero(held[1:] == now[0]) + 1 if len(now) else ():
        rest = held[cut:]
        if np.array_equal(now[: len(rest)], rest):
            return ForkCause.THINKING_STRIPPED
    return ForkCause.RETOKENIZED


def repeats_lines(reply: Message, text: str) -> bool:
    """Whether a text repeats a good part of a reply's lines. Agents shorten a summary and put it into a new frame."""
    lines = [line for one in reply.text.splitlines() if len(line := one.strip()) >= _REPEATED_LINE]
    found = sum(len(line) for line in lines if line in text)
    return found >= _REPEATED and 4 * found >= sum(map(len, lines))


def text_difference(before: Message | None, after: Message | None) -> Difference | None:
    """The first difference in the readable form of two messages."""
    if before is None or after is None:
        return None
    return raw_difference(readable(before), readable(after))


def raw_difference(old: str, new: str) -> Difference:
    """The first difference between two texts."""
    at = _common_text(old, new)
    return Difference(at, old[at : at + _EXCERPT_CHARACTERS], new[at : at + _EXCERPT_CHARACTERS])


def token_difference(before: Turn, after: Turn) -> Difference:
    """The first difference between the ids of an earlier turn and those of a later prompt."""
    at = before.tokens.common_prefix(after.prompt_tokens)
    return Difference(
        at,
        tuple(before.tokens.slice(at, at + _EXCERPT_TOKENS).tolist()),
        tuple(after.prompt_tokens.slice(at, at + _EXCERPT_TOKENS).tolist()),
    )


def readable(message: Message) -> str:
    """A message as text: its thinking, its content, and its calls."""
    return "\n".join(filter(None, _readable_parts(message)))


def _readable_parts(message: Message) -> tuple[str, str, str]:
    calls = message.to_dict().get("tool_calls")
    return (
        f"<think>{message.reasoning}</think>" if message.reasoning else "",
        message.text,
        "\n".join(map(call_text, calls if isinstance(calls, list) else ())),  # any message may have anything there
    )


def is_edit_of(before: Message | None, after: Message | None) -> bool:
    """Whether one message is an edit of the other: at least half of the shorter one is their common start and end.

    The whole messages are compared, and also thinking, content and calls each: clients leave some of these out.
    """
    if before is None or after is None or before.role is not after.role:
        return False
    old, new = readable(before), readable(after)
    by_part = sum(map(_common_ends, _readable_parts(before), _readable_parts(after)))
    return 2 * max(by_part, _common_ends(old, new)) >= min(len(old), len(new)) > 0


def _common_ends(left: str, right: str) -> int:
    """How many characters two texts share at their beginnings, and then at their ends."""
    head = _common_text(left, right)
    return head + _common_text(left[head:][::-1], right[head:][::-1])


def _common_text(left: str, right: str) -> int:
    limit = min(len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit
    low, high = 0, limit  # equal up to `low`, different within `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle)
    return low


def _without_space(value: object) -> bytes:
    return b"".join(canonical_json(_squeezed(value)).split())


def _squeezed(value: object) -> object:
    if isinstance(value, str):
        return "".join(value.split())
    if isinstance(value, dict):
        return {key: _squeezed(item) for key, item in value.items() if _squeezed(item) not in ("", [], {}, None)}
    if isinstance(value, list):
        return [_squeezed(item) for item in value]
    return value


def _has_thinking(value: dict[str, Any]) -> bool:
    return bool(value.get("reasoning_content")) or "<think>" in content_text(value.get("content"))


def _without_thinking(value: dict[str, Any]) -> dict[str, Any]:
    kept = {key: item for key, item in value.items() if key != "reasoning_content"}
    if isinstance(kept.get("content"), str):
        kept["content"] = _THINKING.sub("", kept["content"])
    return kept
