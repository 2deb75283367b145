"""Parse the sampled ids of a whole reply into what the agent gets: text, thinking, tool calls.

Thinking and text are those of the splitter (`splitter.py`) where the model has one, so that a reply is the same whether
it was streamed or not. The calls are those of the renderer.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from rolltape.gateway.prompts.families import Call, Renderer, Response, Tools
from rolltape.gateway.prompts.splitter import ReplySplitter, SplitRules
from rolltape.gateway.prompts.tokenizer import FolderTokenizer
from rolltape.records.turn import Ids

# A name that no tool has is delivered: the agent says so to the model.
_DELIVERED = frozenset({"ok", "unknown_tool"})
_DEEPEST = 100  # levels of arguments; clients' own readers give up somewhere beyond


class ParsedCall(msgspec.Struct, frozen=True):
    """A tool call that the model made."""

    name: str
    arguments: str  # JSON text of an object
    native_id: str | None = None  # sampled by the model itself (Kimi K2), and to be kept


class Parsed(msgspec.Struct, frozen=True, kw_only=True):
    """A reply taken apart. If any of its calls is malformed or cut off, there are none: all of it is text.

    What the model wrote between and after its calls has no place in a message.
    """

    content: str
    reasoning: str | None = None
    calls: tuple[ParsedCall, ...] = ()
    malformed: bool = False
    reasoning_tokens: int = 0
    first_call_end: int | None = None  # how many ids of the reply there are up to the end of its first call

    def to_message(self, call_ids: Sequence[str]) -> dict[str, Any]:
        """The reply in chat form, its calls under these ids."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call_id, call in zip(call_ids, self.calls, strict=True)
            ]
        return message


def parse(
    renderer: Renderer,
    tokenizer: FolderTokenizer,
    rules: SplitRules | None,
    prompt_end: Ids,
    reply: Ids,
    tools: Tools,
    stop_string: str | None,
    calls_as_text: bool,
) -> Parsed:
    """Take a reply apart; `stop_string` ended it, and is no part of it."""
    sampled = reply.tolist()
    try:
        response = renderer.parse_response(sampled, tools=tools, prompt_ids=prompt_end.tolist())
    except (ValueError, RecursionError):
        response = None  # Python's JSON reader gives up on numbers of many digits and on deep nesting
    if rules is None:
        ids = _before_stop(sampled, renderer.get_stop_token_ids())
        return _by_renderer(tokenizer, ids, response, stop_string, calls_as_text)
    begun = begins_thinking(renderer, tokenizer, prompt_end)
    splitter = ReplySplitter(rules, thinking_begun=begun, stop_strings=[stop_string] if stop_string else [])
    splitter.add(reply)
    splitter.end()
    return _by_splitter(splitter, rules, response, calls_as_text)


def begins_thinking(renderer: Renderer, tokenizer: FolderTokenizer, prompt_end: Ids) -> bool:
    """Whether a prompt has opened the thinking with which the reply begins, by the renderer's own judgment."""
    return (
        renderer.parse_response(tokenizer.encode("x"), tools=None, prompt_ids=prompt_end.tolist()).reasoning_complete
        is False
    )


def _by_splitter(splitter: ReplySplitter, rules: SplitRules, response: Response | None, calls_as_text: bool) -> Parsed:
    """The reply that a splitter has read to its end, with the renderer's calls."""
    attempts = [] if response is None or not splitter.has_calls else response.tool_calls
    # A renderer may find calls where the splitter has thinking.
    attempts = [call for call in attempts if not call.token_span or call.token_span[0] >= splitter.reasoning_ids]
    good = [call for call in map(_delivered, attempts) if call is not None]
    unread = splitter.has_calls and not attempts and not rules.json_call  # the mark of a call, and nothing like one
    denied = bool(attempts) and calls_as_text
    malformed = response is None or unread or denied or len(good) < len(attempts)
    reasoning, content = splitter.message(calls_as_text=malformed or not good)
    return Parsed(
        content=content,
        reasoning=reasoning or None,
        calls=() if malformed else tuple(good),
        malformed=malformed,
        reasoning_tokens=splitter.reasoning_ids if reasoning else 0,
        first_call_end=None if malformed else _first_call_end(attempts),
    )


def _by_renderer(
    tokenizer: FolderTokenizer,
    ids: list[int],
    response: Response | None,
    stop_string: str | None,
    calls_as_text: bool,
) -> Parsed:
    """The reply of a model without a splitter."""
    if response is None:
        return _as_text(tokenizer, ids, None, stop_string)
    calls = tuple(_delivered(call) for call in response.tool_calls)
    good = tuple(call for call in calls if call is not None)
    if len(good) < len(calls) or (calls and calls_as_text):
        return _as_text(tokenizer, ids, response, stop_string)
    unfinished = stop_string if response.reasoning_complete is False else None
    return Parsed(
        content=_cut(response.content, stop_string).strip(),
        reasoning=_cut(response.reasoning_content or "", unfinished).strip() or None,
        calls=good,
        reasoning_tokens=_reasoning_tokens(tokenizer, ids, response),
        first_call_end=_first_call_end(response.tool_calls),
    )


def _first_call_end(calls: Sequence[Call]) -> int | None:
    return next((call.token_span[1] for call in calls[:1] if call.token_span), None)


def plain_text(tokenizer: FolderTokenizer, reply: list[int], stop_ids: Sequence[int], stop_string: str | None) -> str:
    """The text of a reply that is not taken apart, without what ended it."""
    return _cut(tokenizer.decode(_before_stop(reply, stop_ids)), stop_string)


def _before_stop(ids: list[int], stop_ids: Sequence[int]) -> list[int]:
    stops = frozenset(stop_ids)
    return ids[: next((at for at, token in enumerate(ids) if token in stops), len(ids))]


def _delivered(call: Call) -> ParsedCall | None:
    """A call that survives the way through a client and back; None: it does not."""
    if str(call.status) not in _DELIVERED or not isinstance(call.name, str) or not _is_unicode(call.name):
        return None
    arguments = arguments_text({} if call.arguments is None else call.arguments)
    return None if arguments is None else ParsedCall(call.name, arguments, call.id)


def arguments_text(arguments: object) -> str | None:
    """Arguments as JSON; None where they are no object, or hold what JSON or its readers cannot."""
    if not isinstance(arguments, dict) or not _is_ordinary(arguments):
        return None
    text = json.dumps(arguments, ensure_ascii=False)
    return text if _is_unicode(text) else None


def _is_ordinary(value: object) -> bool:
    """Whether every JSON reader gives it back: not too deep, and no number that a double cannot hold."""
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


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _as_text(tokenizer: FolderTokenizer, ids: list[int], response: Response | None, stop_string: str | None) -> Parsed:
    """The reply as the model wrote it, its thinking apart."""
    spans = [] if response is None else [call.token_span for call in response.tool_calls if call.token_span]
    if response is None or not spans:
        thinking, closed, rest = tokenizer.decode(ids).partition("</think>")
        reasoning = thinking.replace("<think>", "", 1).strip() if closed else None
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
    """How many ids the thinking took, its closing mark included."""
    if not response.reasoning_content:
        return 0
    if response.reasoning_complete is False:
        return len(ids)
    closing = tokenizer.convert_tokens_to_ids("</think>")
    if closing is not None and closing in ids:
        return ids.index(closing) + 1
    return len(tokenizer.encode(response.reasoning_content))
