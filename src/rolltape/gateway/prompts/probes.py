"""Small conversations that compare a renderer with a folder's own chat template, id by id."""

import json
from typing import Any

from rolltape.errors import PromptError
from rolltape.gateway.prompts.families import Renderer, template_options
from rolltape.gateway.prompts.messages import Chat
from rolltape.gateway.prompts.tokenizer import FolderTokenizer

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

_PROBES: tuple[tuple[Chat, list[dict[str, Any]] | None], ...] = (
    ([_ASKED], None),
    ([_SYSTEM, _ASKED], None),
    ([_ASKED, _TOLD, _ASKED], None),
    ([_SYSTEM, _ASKED, _MUSED, _ASKED], None),
    ([_ASKED], _TOOLS),
    ([_SYSTEM, _ASKED, _CALLED, _HEARD], _TOOLS),
    ([_SYSTEM, _ASKED, _THOUGHT, _HEARD], _TOOLS),
    ([_ASKED, _THOUGHT, _HEARD, _TOLD, _ASKED], _TOOLS),
)


def agreement(renderer: Renderer, tokenizer: FolderTokenizer, *, with_tools: bool = True) -> int | None:
    """On how many probes the two give the same ids; None: they disagree on one, or there is nothing to compare.

    A conversation that the template refuses says nothing about the renderer.
    """
    agreed = 0
    for chat, tools in _PROBES:
        if tools and not with_tools:
            continue
        expected = [_by_template(renderer, tokenizer, form, tools) for form in _forms(chat)]
        accepted = [ids for ids in expected if ids is not None]
        if accepted and rendered(renderer, chat, tools) not in accepted:
            return None
        agreed += bool(accepted)
    return agreed or None


def agrees_on_question(renderer: Renderer, tokenizer: FolderTokenizer) -> bool:
    """Whether the two give the same ids for a single question.

    With thinking off, renderers keep the empty thought of earlier replies, which templates drop; a question has none.
    """
    return rendered(renderer, [_ASKED]) == _by_template(renderer, tokenizer, [_ASKED], None)


def _forms(chat: Chat) -> list[Chat]:
    """A conversation in the forms in which templates want calls: beside a text or none, arguments as object or text."""
    if not any("tool_calls" in message for message in chat):
        return [chat]
    without_text = [message | {"content": message["content"] or None} for message in chat]
    call = _CALL | {"function": {"name": "look", "arguments": json.dumps(_ARGUMENTS, ensure_ascii=False)}}
    as_text = [message | {"tool_calls": [call]} if "tool_calls" in message else message for message in without_text]
    return [chat, without_text, as_text]


def _by_template(
    renderer: Renderer, tokenizer: FolderTokenizer, chat: Chat, tools: list[dict[str, Any]] | None
) -> list[int] | None:
    """The ids by the folder's template under the renderer's options; None: it refuses the conversation."""
    options = template_options(renderer)
    try:
        return tokenizer.apply_chat_template(chat, tools=tools, add_generation_prompt=True, **options)
    except PromptError:
        return None


def rendered(renderer: Renderer, chat: Chat, tools: list[dict[str, Any]] | None = None) -> list[int] | None:
    """The ids of a probe; None: the renderer refuses it."""
    try:
        return renderer.render_ids(chat, tools=tools, add_generation_prompt=True)
    except Exception:  # noqa: BLE001 - renderers and templates refuse with errors of many kinds
        return None


def takes_system_anywhere(renderer: Renderer, tokenizer: FolderTokenizer) -> bool:
    """Whether a system message may come in the middle: neither refused nor left out."""
    word = "zebra"
    late = {"role": "system", "content": word}
    for chat in ([_SYSTEM, _ASKED, _TOLD, late, _ASKED], [_SYSTEM, late, _ASKED]):
        ids = rendered(renderer, chat)
        if ids is None or word not in tokenizer.decode(ids):
            return False
    return True


def renders_call_ids(renderer: Renderer) -> bool:
    """Whether the ids of tool calls are part of the prompt, as they are for Kimi K2."""
    chats: list[Chat] = [
        [_ASKED, _CALLED | {"tool_calls": [_CALL | {"id": call_id}]}, _HEARD | {"tool_call_id": call_id}]
        for call_id in ("functions.look:0", "functions.look:1")
    ]
    one, other = (rendered(renderer, chat, _TOOLS) for chat in chats)
    return one != other
