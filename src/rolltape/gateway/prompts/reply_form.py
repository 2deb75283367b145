"""How a model's family writes replies: its plain text, calls and thinking, and the marks that tell them apart.

Constrained decoding needs the form letter by letter, which is found by rendering probes. A family whose probes do not
show it has none.
"""

import enum
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from rolltape.gateway.prompts.families import (
    REPLY_MARKS,
    THINK_END,
    THINK_START,
    CallInThinking,
    Chat,
    Renderer,
    Tools,
)
from rolltape.gateway.prompts.tokenizer import FolderTokenizer

_NAMES = ("probe_a", "probe_b")
_ARGUMENTS = {"q": "zz"}
# What the probe's arguments look like, by the word that structural tags have for it.
_STYLES = {"json": '{"q": "zz"}', "qwen_xml": "<parameter=q>\nzz\n</parameter>"}
_NO_THOUGHT = re.compile(rf"\s*(?:{THINK_START})?\s*{THINK_END}")
_TOOLS: Tools = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}
    for name in _NAMES
]
_ASKED = {"role": "user", "content": "hi"}


class Thinking(enum.StrEnum):
    """Whether a reply begins with thinking."""

    OFF = "off"
    POSSIBLE = "possible"  # the model opens it, or does not
    BEGUN = "begun"  # the prompt has opened it


class CallForm(msgspec.Struct, frozen=True, kw_only=True):
    """The text around a call's name and arguments: `opening begin NAME middle ARGUMENTS end closing`."""

    opening: str  # before the first call
    begin: str
    middle: str
    style: str  # of the arguments: "json" or "qwen_xml"
    end: str
    between: str | None  # two calls; None: a reply has one at most
    closing: str  # after the last call


class ReplyForm(msgspec.Struct, frozen=True):
    """What can be told of a family's replies."""

    plain: bool  # a text is written as it is, with nothing before it
    call: CallForm | None  # None: it is not known
    think_end_id: int | None  # the id that ends thinking; None: the vocabulary has none


def find_reply_form(renderer: Renderer, tokenizer: FolderTokenizer) -> ReplyForm:
    """The form of a family's replies, by a renderer of it whose thinking is off where that can be."""
    text = _reply(renderer, tokenizer, {"role": "assistant", "content": "TEXT"})
    call = _call_form(renderer, tokenizer)
    if call is not None and not _reads(renderer, tokenizer, call):
        call = None
    return ReplyForm(text == "TEXT", call, tokenizer.convert_tokens_to_ids(THINK_END))


def _call_form(renderer: Renderer, tokenizer: FolderTokenizer) -> CallForm | None:
    one = _reply(renderer, tokenizer, _calling(_NAMES[:1]))
    style = next((style for style, written in _STYLES.items() if one and one.count(written) == 1), None)
    if one is None or style is None or one.count(_NAMES[0]) != 1:
        return None
    before, rest = one.split(_NAMES[0])
    middle, found, after = rest.partition(_STYLES[style])
    if not found:
        return None  # the name comes after the arguments
    both = _reply(renderer, tokenizer, _calling(_NAMES))
    first = f"{before}{_NAMES[0]}{middle}{_STYLES[style]}"
    last = f"{_NAMES[1]}{middle}{_STYLES[style]}{after}"
    if both is None:  # refused: the family writes one call at most
        return CallForm(opening="", begin=before, middle=middle, style=style, end=after, between=None, closing="")
    if not both.startswith(first) or not both.endswith(last):
        return None  # the second call is written otherwise than the first, as under a running number
    gap = both[len(first) : len(both) - len(last)]
    begin = before[len(before) - _shared(before[::-1], gap[::-1]) :]
    end = after[: _shared(after, gap[: len(gap) - len(begin)])]
    return CallForm(
        opening=before.removesuffix(begin),
        begin=begin,
        middle=middle,
        style=style,
        end=end,
        between=gap[len(end) : len(gap) - len(begin)],
        closing=after.removeprefix(end),
    )


def _reads(renderer: Renderer, tokenizer: FolderTokenizer, form: CallForm) -> bool:
    """Whether the family finds a call of that form in a reply; a template of unknown form finds none."""
    call = f"{form.begin}{_NAMES[0]}{form.middle}{_STYLES[form.style]}{form.end}"
    ids = tokenizer.encode(f"{form.opening}{call}{form.closing}")
    prompt = _rendered(renderer, [_ASKED], generate=True) or []
    found = renderer.parse_response(ids, tools=_TOOLS, prompt_ids=prompt).tool_calls
    return [(call.name, call.arguments) for call in found] == [(_NAMES[0], _ARGUMENTS)]


def _calling(names: tuple[str, ...]) -> dict[str, Any]:
    calls = [
        {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": _ARGUMENTS}}
        for at, name in enumerate(names)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _reply(renderer: Renderer, tokenizer: FolderTokenizer, message: dict[str, Any]) -> str | None:
    """A message as the model would write it, without its thinking and its end; None: the family refuses it."""
    prompt, stops = _rendered(renderer, [_ASKED], generate=True), renderer.get_stop_token_ids()
    whole = _rendered(renderer, [_ASKED, message], generate=False)
    if prompt is None or whole is None:
        return None
    written = whole[_shared(prompt, whole) :]
    ended = next((at for at, token in enumerate(written) if token in stops), len(written))
    text = tokenizer.decode(written[:ended])
    thought = _NO_THOUGHT.match(text)
    return text[thought.end() if thought else 0 :].strip()


def _shared(one: Sequence[object], other: Sequence[object]) -> int:
    """How much two texts or lists have in common at their beginning."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def _rendered(renderer: Renderer, chat: Chat, *, generate: bool) -> list[int] | None:
    try:
        return list(renderer.render_ids(chat, tools=_TOOLS, add_generation_prompt=generate))
    except Exception:  # noqa: BLE001 - renderers and templates refuse with errors of many kinds
        return None


class Mark(enum.Enum):
    """What a mark says."""

    THINK_START = "think_start"
    THINK_END = "think_end"
    CALL = "call"
    STOP = "stop"


class ReplyPart(enum.Enum):
    """The part of a reply that is being read."""

    OPENING = "opening"  # nothing but white space so far
    THINKING = "thinking"
    DRAFT = "draft"  # a call while thinking is open: part of the thinking if that is closed later, else the calls
    TEXT = "text"
    CALLS = "calls"


class SplitRules(msgspec.Struct, frozen=True):
    """How the replies of one model are split."""

    tokenizer: FolderTokenizer
    in_thinking: CallInThinking
    tokens: dict[int, Mark]  # the ids that are marks
    spelled: dict[str, Mark]  # the marks that count whatever ids spell them
    openings: tuple[str, ...]  # those of them with which a reply may begin
    inside: dict[ReplyPart, tuple[str, ...]]  # and those that count inside a part
    id_by_id: frozenset[ReplyPart]  # where a spelled mark may end the thinking, so that the id that completes it counts
    json_call: bool  # a reply that begins with `{` may be a call, and is text if it is none


def find_split_rules(family: str, tokenizer: FolderTokenizer, stop_ids: Sequence[int]) -> SplitRules | None:
    """The rules for a family and its tokenizer; None: its replies are taken apart when they are whole."""
    marks = REPLY_MARKS.get(family)
    if marks is None or not tokenizer.is_byte_level:
        return None
    calls = [tokenizer.convert_tokens_to_ids(mark) for mark in marks.calls]
    if None in calls:
        return None
    tokens = {token: Mark.CALL for token in calls if token is not None}
    spelled = dict.fromkeys((*marks.spelled_calls, *marks.spelled_in_thinking), Mark.CALL)
    openings: tuple[str, ...] = ()
    draft: tuple[str, ...] = ()
    thinking = marks.spelled_in_thinking
    start, end = (tokenizer.convert_tokens_to_ids(mark) for mark in (marks.think_start, marks.think_end))
    if marks.json_call:
        openings, spelled = ("{",), {"{": Mark.CALL}
    elif start is not None and end is not None:
        tokens |= {start: Mark.THINK_START, end: Mark.THINK_END}
    else:
        openings, draft = (marks.think_start,), (marks.think_end,)
        thinking += openings + draft
        spelled |= {marks.think_start: Mark.THINK_START, marks.think_end: Mark.THINK_END}
    return SplitRules(
        tokenizer=tokenizer,
        in_thinking=marks.in_thinking,
        tokens=tokens | dict.fromkeys(stop_ids, Mark.STOP),
        spelled=spelled,
        openings=openings,
        inside={
            ReplyPart.OPENING: marks.spelled_calls,
            ReplyPart.THINKING: thinking,
            ReplyPart.DRAFT: draft,
            ReplyPart.TEXT: marks.spelled_calls,
            ReplyPart.CALLS: (),
        },
        id_by_id=frozenset((ReplyPart.OPENING, ReplyPart.THINKING, ReplyPart.DRAFT) if thinking else ()),
        json_call=marks.json_call,
    )
