"""Choose the renderer for a model folder: the one named, or one whose prompts equal the folder's template.

The two are compared on small conversations, id by id.
"""

import json
from typing import Any

import msgspec

from rolltape.errors import CheckpointError, PromptError
from rolltape.gateway.prompts.families import (
    DEFAULT,
    Chat,
    Renderer,
    Tools,
    guessable,
    make,
    template_options,
    thinking_option,
    try_render,
)
from rolltape.gateway.prompts.tokenizer import FolderTokenizer

_HERMES = '{"name": <function-name>, "arguments": <args-json-object>}'

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at a place — über alles",
            "parameters": {"type": "object", "properties": {"where": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
]
_SYSTEM = {"role": "system", "content": "Be brief.\n\nBe kind."}
_ASKED = {"role": "user", "content": "What is there, in 1,000 words?\n"}
_ARGUMENTS = {"where": "Köln", "n": 2}
_CALL = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": _ARGUMENTS}}
_CALLED = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_THOUGHT = {"role": "assistant", "content": "I look.", "reasoning_content": "I must look.", "tool_calls": [_CALL]}
_HEARD = {"role": "tool", "content": '{"seen": ["a", "b"]}', "tool_call_id": "call_0", "name": "look"}
_TOLD = {"role": "assistant", "content": "Two things."}
_MUSED = {"role": "assistant", "content": "Two things.", "reasoning_content": "a and b"}

_PROBES: tuple[tuple[Chat, Tools], ...] = (
    ([_ASKED], None),
    ([_SYSTEM, _ASKED], None),
    ([_ASKED, _TOLD, _ASKED], None),
    ([_SYSTEM, _ASKED, _MUSED, _ASKED], None),
    ([_ASKED], _TOOLS),
    ([_SYSTEM, _ASKED, _CALLED, _HEARD], _TOOLS),
    ([_SYSTEM, _ASKED, _THOUGHT, _HEARD], _TOOLS),
    ([_ASKED, _THOUGHT, _HEARD, _TOLD, _ASKED], _TOOLS),
)


class RendererChoice(msgspec.Struct, frozen=True):
    """A family and why it was chosen."""

    name: str
    why: str
    thinking_option: str | None  # the template option that turns thinking on and off, or None
    options: dict[str, Any] = {}  # for making its renderers
    warning: str | None = None


class TemplateMatch(msgspec.Struct, frozen=True, kw_only=True):
    """How a renderer's prompts compare with those of a folder's own template, over small conversations."""

    agreed: int  # conversations with the same ids
    chat: Chat | None = None  # the first one with different ids, or None
    rendered: list[int] | None = None  # its ids by the renderer; None if refused
    expected: list[int] | None = None  # its ids by the template


def choose(tokenizer: FolderTokenizer, named: str | None) -> RendererChoice:
    """Choose the family for a folder, with a warning if its prompts differ from the template's, or do not bridge."""
    if named is not None and named != DEFAULT:
        return _as_named(tokenizer, named)
    if tokenizer.template is None:
        raise CheckpointError(f"{tokenizer.name_or_path}: no chat template to choose the renderer by; name one")
    fitting = [] if named else _fitting(tokenizer)
    for name, renderer in fitting:
        if agreed := _agreement(renderer, tokenizer):
            return RendererChoice(
                name, f"renders as the folder's template on {agreed} probes", _switch(name, tokenizer)
            )
    why = "named" if named else "no renderer gives the ids of the folder's template"
    near = [name for name, renderer in fitting if _agreement(renderer, tokenizer, with_tools=False)]
    warning = (
        f"{tokenizer.name_or_path}: its chat template renders every prompt whole ({why}), so replies are tokenized "
        "again in every later prompt, and a sample ends where that changes the ids"
        + (f"; you can name {near[0]}, which differs from the template only in prompts with tools" if near else "")
    )
    return RendererChoice(DEFAULT, why, thinking_option(DEFAULT, tokenizer), _reply_format(tokenizer), warning)


def _as_named(tokenizer: FolderTokenizer, name: str) -> RendererChoice:
    renderer = make(name, tokenizer)
    if tokenizer.template is None:
        return RendererChoice(
            name, "named; the folder has no template to compare with", thinking_option(name, tokenizer)
        )
    agreed = _agreement(renderer, tokenizer)
    if agreed is not None:
        return RendererChoice(
            name, f"named; renders as the folder's template on {agreed} probes", _switch(name, tokenizer)
        )
    warning = (
        f"{tokenizer.name_or_path}: renderer {name} was named, but the folder's chat template renders otherwise; "
        "leave the name out unless the model was trained with that renderer"
    )
    why = "named; the folder's template renders otherwise"
    return RendererChoice(name, why, thinking_option(name, tokenizer), warning=warning)


def _fitting(tokenizer: FolderTokenizer) -> list[tuple[str, Renderer]]:
    """The families whose special tokens the tokenizer has."""
    fitting = []
    for name in guessable():
        try:
            fitting.append((name, make(name, tokenizer)))
        except CheckpointError:
            continue
    return fitting


def _switch(name: str, tokenizer: FolderTokenizer) -> str | None:
    """The family's thinking option, if the folder's template has it too; some checkpoints of a family lack it."""
    option = thinking_option(name, tokenizer)
    if option is None:
        return None
    renderers = [make(name, tokenizer, **{option: on}) for on in (True, False)]
    return option if all(_agrees_on_question(renderer, tokenizer) for renderer in renderers) else None


def _reply_format(tokenizer: FolderTokenizer) -> dict[str, Any]:
    """The renderer options for the form of calls that the template asks for."""
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
    try:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tools=[tool])
    except PromptError:
        return {}
    return {"tool_parser": "qwen3"} if _HERMES in tokenizer.decode(ids) else {}


def _agreement(renderer: Renderer, tokenizer: FolderTokenizer, *, with_tools: bool = True) -> int | None:
    """The number of probes with equal ids, or None if one differs or there is nothing to compare."""
    match = compare_with_template(renderer, tokenizer, with_tools=with_tools)
    return match.agreed or None if match.chat is None else None


def compare_with_template(renderer: Renderer, tokenizer: FolderTokenizer, *, with_tools: bool = True) -> TemplateMatch:
    """Render the probes both ways, up to the first that differs.

    Conversations that the template refuses do not count.
    """
    agreed = 0
    for chat, tools in _PROBES:
        if tools and not with_tools:
            continue
        expected = [_by_template(renderer, tokenizer, form, tools) for form in _forms(chat)]
        accepted = [ids for ids in expected if ids is not None]
        rendered = try_render(renderer, chat, tools) if accepted else None
        if accepted and rendered not in accepted:
            return TemplateMatch(agreed=agreed, chat=chat, rendered=rendered, expected=accepted[0])
        agreed += bool(accepted)
    return TemplateMatch(agreed=agreed)


def _agrees_on_question(renderer: Renderer, tokenizer: FolderTokenizer) -> bool:
    """Whether both render a single question to the same ids.

    With thinking off, renderers keep the empty thinking of earlier replies, and templates drop it. A question has none.
    """
    return try_render(renderer, [_ASKED], None) == _by_template(renderer, tokenizer, [_ASKED], None)


def _forms(chat: Chat) -> list[Chat]:
    """A conversation in the forms of calls that templates expect: with or without text, arguments as object or text."""
    if not any("tool_calls" in message for message in chat):
        return [chat]
    without_text = [message | {"content": message["content"] or None} for message in chat]
    call = _CALL | {"function": {"name": "look", "arguments": json.dumps(_ARGUMENTS, ensure_ascii=False)}}
    as_text = [message | {"tool_calls": [call]} if "tool_calls" in message else message for message in without_text]
    return [chat, without_text, as_text]


def _by_template(renderer: Renderer, tokenizer: FolderTokenizer, chat: Chat, tools: Tools) -> list[int] | None:
    """The ids by the folder's template with the renderer's options, or None if it refuses the conversation."""
    options = template_options(renderer)
    try:
        return tokenizer.apply_chat_template(chat, tools=tools, add_generation_prompt=True, **options)
    except PromptError:
        return None


def takes_system_anywhere(renderer: Renderer, tokenizer: FolderTokenizer) -> bool:
    """Whether a system message in the middle is neither refused nor left out."""
    word = "zebra"
    late = {"role": "system", "content": word}
    for chat in ([_SYSTEM, _ASKED, _TOLD, late, _ASKED], [_SYSTEM, late, _ASKED]):
        ids = try_render(renderer, chat, None)
        if ids is None or word not in tokenizer.decode(ids):
            return False
    return True


def renders_call_ids(renderer: Renderer) -> bool:
    """Whether the ids of tool calls are part of the prompt, as for Kimi K2."""
    chats: list[Chat] = [
        [_ASKED, _CALLED | {"tool_calls": [_CALL | {"id": call_id}]}, _HEARD | {"tool_call_id": call_id}]
        for call_id in ("functions.look:0", "functions.look:1")
    ]
    one, other = (try_render(renderer, chat, _TOOLS) for chat in chats)
    return one != other
