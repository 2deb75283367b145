"""Dialogues as data, and their text in the Qwen3 chat format with the part that the model says marked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

TOOLS_HEADER = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_FOOTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

Tool = dict[str, Any]


class Voice(IntEnum):
    """Whose words a stretch of text is."""

    TEMPLATE = 0
    """Scaffold before and after a reply, or a reply that is no example to follow."""
    OTHERS = 1
    """System, tools, user."""
    MODEL = 2
    """What the model is to say, its end-of-turn mark included."""


@dataclass(frozen=True)
class Call:
    """One tool call: a name and its arguments."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Message:
    """One message; `thinking` is None where the speaker does not think, `trained` is for assistants only."""

    role: str
    content: str = ""
    thinking: str | None = None
    calls: tuple[Call, ...] = ()
    trained: bool = True


@dataclass(frozen=True)
class Dialogue:
    """Messages, the tools on offer, whether thinking is on, and whether past thinking stays in the prompt."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thinking_on: bool = False
    keep_thinking: bool = True


@dataclass(frozen=True)
class Scene:
    """A stretch of conversation about one task, with the tools that it needs."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tags: frozenset[str] = field(default_factory=frozenset)


def user(content: str) -> Message:
    """What the person says."""
    return Message("user", content)


def tool(content: str) -> Message:
    """What a tool answers."""
    return Message("tool", content)


def says(content: str, thinking: str | None = None, *, trained: bool = True) -> Message:
    """A reply in words."""
    return Message("assistant", content, thinking, trained=trained)


def calls(*made: Call, content: str = "", thinking: str | None = None, trained: bool = True) -> Message:
    """A reply that calls tools."""
    return Message("assistant", content, thinking, made, trained)


def segments(dialogue: Dialogue) -> Iterator[tuple[str, Voice]]:
    """Stretches of text, each with its voice; joined they are the rendered conversation."""
    messages = dialogue.messages
    yield from _system(dialogue)
    last_query = max((i for i, m in enumerate(messages) if m.role == "user"), default=len(messages) - 1)
    for i, message in enumerate(messages):
        if message.role == "system" and i == 0:
            continue
        if message.role == "tool":
            opens = i == 0 or messages[i - 1].role != "tool"
            closes = i == len(messages) - 1 or messages[i + 1].role != "tool"
            head = "<|im_start|>user" if opens else ""
            tail = "<|im_end|>\n" if closes else ""
            yield f"{head}\n<tool_response>\n{message.content}\n</tool_response>{tail}", Voice.OTHERS
        elif message.role == "assistant":
            yield from _reply(dialogue, message, in_cycle=i > last_query)
        else:
            yield f"<|im_start|>{message.role}\n{message.content}<|im_end|>\n", Voice.OTHERS


def opening(*, thinking_on: bool) -> str:
    """The generation prompt: what stands before the model's own first token."""
    return "<|im_start|>assistant\n" + ("" if thinking_on else "<think>\n\n</think>\n\n")


def prompt_text(dialogue: Dialogue) -> str:
    """The text that the model is asked to continue."""
    return "".join(text for text, _ in segments(dialogue)) + opening(thinking_on=dialogue.thinking_on)


def as_chat(dialogue: Dialogue) -> list[dict[str, Any]]:
    """The messages as chat templates and the `renderers` package take them."""
    chat: list[dict[str, Any]] = []
    for message in dialogue.messages:
        entry: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking is not None:
            entry["reasoning_content"] = message.thinking
        if message.calls:
            entry["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.calls
            ]
        chat.append(entry)
    return chat


def _system(dialogue: Dialogue) -> Iterator[tuple[str, Voice]]:
    first = dialogue.messages[0]
    written = first.content if first.role == "system" else None
    if dialogue.tools:
        lead = "" if written is None else written + "\n\n"
        listed = "".join("\n" + json.dumps(spec, ensure_ascii=False) for spec in dialogue.tools)
        yield f"<|im_start|>system\n{lead}{TOOLS_HEADER}{listed}{TOOLS_FOOTER}<|im_end|>\n", Voice.OTHERS
    elif written is not None:
        yield f"<|im_start|>system\n{written}<|im_end|>\n", Voice.OTHERS


def _reply(dialogue: Dialogue, message: Message, *, in_cycle: bool) -> Iterator[tuple[str, Voice]]:
    # A past reply whose thinking was stripped is no example of how to reply with thinking on.
    stripped = dialogue.thinking_on and not in_cycle and not dialogue.keep_thinking
    yield opening(thinking_on=dialogue.thinking_on), Voice.TEMPLATE
    body = message.content + _calls_text(message)
    if dialogue.thinking_on and not stripped:
        body = f"<think>\n{message.thinking or ''}\n</think>\n\n{body}"
    yield body + "<|im_end|>", Voice.MODEL if message.trained and not stripped else Voice.TEMPLATE
    yield "\n", Voice.TEMPLATE


def _calls_text(message: Message) -> str:
    written = [
        f'<tool_call>\n{{"name": "{call.name}", "arguments": {json.dumps(call.arguments, ensure_ascii=False)}}}\n'
        "</tool_call>"
        for call in message.calls
    ]
    lead = "\n" if message.content and written else ""
    return lead + "\n".join(written)
