"""How a model's family writes replies: its plain text, its calls and its thinking.

Constrained decoding needs the exact form. It is found by rendering probes, and is unknown if they do not show it.
"""

import enum
import re
from typing import Any

import msgspec

from rolltape.gateway.prompts.families import THINK_END, THINK_START, Renderer, Tools, try_render
from rolltape.gateway.prompts.tokenizer import FolderTokenizer
from rolltape.records.turn import common_length

_NAMES = ("probe_a", "probe_b")
_ARGUMENTS = {"q": "zz"}
# The written form of the probe's arguments, by its name in structural tags.
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
    POSSIBLE = "possible"  # the model decides
    BEGUN = "begun"  # the prompt has opened it


class CallForm(msgspec.Struct, frozen=True, kw_only=True):
    """The text around a call's name and arguments: `opening begin NAME middle ARGUMENTS end closing`."""

    opening: str  # before the first call
    begin: str
    middle: str
    style: str  # of the arguments: "json" or "qwen_xml"
    end: str
    between: str | None  # between two calls; None if a reply has at most one
    closing: str  # after the last call


class ReplyForm(msgspec.Struct, frozen=True):
    """The known form of a family's replies."""

    plain: bool  # a text is written unchanged, with nothing before it
    call: CallForm | None  # None if unknown
    think_end_id: int | None  # the id that ends thinking, or None if the vocabulary has none


def find_reply_form(renderer: Renderer, tokenizer: FolderTokenizer) -> ReplyForm:
    """Find the form of a family's replies, with a renderer whose thinking is off if possible."""
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
    if both is None:  # refused: the family writes at most one call
        return CallForm(opening="", begin=before, middle=middle, style=style, end=after, between=None, closing="")
    if not both.startswith(first) or not both.endswith(last):
        return None  # the second call has another form than the first, such as a number
    gap = both[len(first) : len(both) - len(last)]
    begin = before[len(before) - common_length(before[::-1], gap[::-1]) :]
    end = after[: common_length(after, gap[: len(gap) - len(begin)])]
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
    """Whether the family's parser finds a call of this form in a reply; for an unknown template it finds none."""
    call = f"{form.begin}{_NAMES[0]}{form.middle}{_STYLES[form.style]}{form.end}"
    ids = tokenizer.encode(f"{form.opening}{call}{form.closing}")
    prompt = try_render(renderer, [_ASKED], _TOOLS) or []
    found = renderer.parse_response(ids, tools=_TOOLS, prompt_ids=prompt).tool_calls
    return [(call.name, call.arguments) for call in found] == [(_NAMES[0], _ARGUMENTS)]


def _calling(names: tuple[str, ...]) -> dict[str, Any]:
    calls = [
        {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": _ARGUMENTS}}
        for at, name in enumerate(names)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _reply(renderer: Renderer, tokenizer: FolderTokenizer, message: dict[str, Any]) -> str | None:
    """A message as the model would write it, without its thinking and its end, or None if the family refuses it."""
    prompt, stops = try_render(renderer, [_ASKED], _TOOLS), renderer.get_stop_token_ids()
    whole = try_render(renderer, [_ASKED, message], _TOOLS, opens_reply=False)
    if prompt is None or whole is None:
        return None
    written = whole[common_length(prompt, whole) :]
    ended = next((at for at, token in enumerate(written) if token in stops), len(written))
    text = tokenizer.decode(written[:ended])
    thought = _NO_THOUGHT.match(text)
    return text[thought.end() if thought else 0 :].strip()
