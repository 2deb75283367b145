"""Parse a complete reply: its text, thinking and tool calls, as the renderer finds them.

If the model has a splitter (`splitter.py`), only the calls come from the renderer.
"""

import json
import math
from collections.abc import Iterable, Sequence

import msgspec

from rolltape.gateway.prompts.families import THINK_END, THINK_START, Call, Response
from rolltape.gateway.prompts.tokenizer import FolderTokenizer
from rolltape.tape.recording.fields import is_unicode

# A call of an unknown tool is delivered: the agent reports it to the model.
_DELIVERED = frozenset({"ok", "unknown_tool"})
_DEEPEST = 100  # levels of arguments; clients' own parsers fail at some larger depth


class ParsedCall(msgspec.Struct, frozen=True):
    """A tool call that the model made."""

    name: str
    arguments: str  # JSON text of an object
    native_id: str | None = None  # sampled by the model itself (Kimi K2), and so kept


class Parsed(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed reply. If any of its calls is malformed or incomplete, all of it is text, without calls.

    Text between and after calls is dropped: a message has no place for it.
    """

    content: str
    reasoning: str | None = None
    calls: tuple[ParsedCall, ...] = ()
    malformed: bool = False
    reasoning_tokens: int = 0
    first_call_end: int | None = None  # how many ids the reply has up to the end of its first call


def parse_by_renderer(
    tokenizer: FolderTokenizer,
    reply: list[int],
    stop_ids: Sequence[int],
    response: Response | None,
    stop_string: str | None,
    calls_as_text: bool,
) -> Parsed:
    """The reply of a model without a splitter."""
    ids = before_stop(reply, stop_ids)
    if response is None:
        return _as_text(tokenizer, ids, None, stop_string)
    calls = tuple(delivered(call) for call in response.tool_calls)
    good = tuple(call for call in calls if call is not None)
    if len(good) < len(calls) or (calls and calls_as_text):
        return _as_text(tokenizer, ids, response, stop_string)
    unfinished = stop_string if response.reasoning_complete is False else None
    return Parsed(
        content=_cut(response.content, stop_string).strip(),
        reasoning=_cut(response.reasoning_content or "", unfinished).strip() or None,
        calls=good,
        reasoning_tokens=_reasoning_tokens(tokenizer, ids, response),
        first_call_end=first_call_end(response.tool_calls),
    )


def first_call_end(calls: Sequence[Call]) -> int | None:
    return next((call.token_span[1] for call in calls[:1] if call.token_span), None)


def plain_text(tokenizer: FolderTokenizer, reply: list[int], stop_ids: Sequence[int], stop_string: str | None) -> str:
    """The text of a reply that is not split into parts, without the stop id or string."""
    return _cut(tokenizer.decode(before_stop(reply, stop_ids)), stop_string)


def before_stop(ids: list[int], stop_ids: Iterable[int]) -> list[int]:
    """The ids up to the first stop id."""
    stops = frozenset(stop_ids)
    return ids[: next((at for at, token in enumerate(ids) if token in stops), len(ids))]


def delivered(call: Call) -> ParsedCall | None:
    """The call as delivered, or None if it would not survive the way through a client and back."""
    if str(call.status) not in _DELIVERED or not isinstance(call.name, str) or not is_unicode(call.name):
        return None
    arguments = arguments_text({} if call.arguments is None else call.arguments)
    return None if arguments is None else ParsedCall(call.name, arguments, call.id)


def arguments_text(arguments: object) -> str | None:
    """Arguments as JSON, or None if they are no object, or have values that JSON or its parsers cannot hold."""
    if not isinstance(arguments, dict) or not _is_ordinary(arguments):
        return None
    text = json.dumps(arguments, ensure_ascii=False)
    return text if is_unicode(text) else None


def _is_ordinary(value: object) -> bool:
    """Whether every JSON parser can read it: not nested too deep, and no number that a double cannot hold."""
    level = [value]
    for _ in range(_DEEPEST):
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
            elif isinstance(item, int | float) and not _is_finite(item):
                return False
        if not inner:
            return True
        level = inner
    return False


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def _as_text(tokenizer: FolderTokenizer, ids: list[int], response: Response | None, stop_string: str | None) -> Parsed:
    """The reply as the model wrote it, with its thinking separate."""
    spans = [] if response is None else [call.token_span for call in response.tool_calls if call.token_span]
    if response is None or not spans:
        thinking, closed, rest = tokenizer.decode(ids).partition(THINK_END)
        reasoning = thinking.replace(THINK_START, "", 1).strip() if closed else None
        content = _cut(rest if closed else thinking, stop_string).strip()
        return Parsed(content=content, reasoning=reasoning or None, malformed=True)
    first_call = min(start for start, _ in spans)
    before = tokenizer.decode(ids[:first_call])
    gap = before[len(before.rstrip()) :] if response.content else ""
    written = response.content.rstrip() + gap + tokenizer.decode(ids[first_call:])
    return Parsed(
        content=_cut(written, stop_string).strip(),
        reasoning=(response.reasoning_content or "").strip() or None,
        malformed=True,
        reasoning_tokens=_reasoning_tokens(tokenizer, ids, response),
    )


def _cut(text: str, stop_string: str | None) -> str:
    at = -1 if not stop_string else text.find(stop_string)
    return text if at < 0 else text[:at]


def _reasoning_tokens(tokenizer: FolderTokenizer, ids: list[int], response: Response) -> int:
    """How many ids the thinking has, with its closing mark."""
    if not response.reasoning_content:
        return 0
    if response.reasoning_complete is False:
        return len(ids)
    closing = tokenizer.convert_tokens_to_ids(THINK_END)
    if closing is not None and closing in ids:
        return ids.index(closing) + 1
    return len(tokenizer.encode(response.reasoning_content))
