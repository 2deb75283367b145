"""What a task says first: `prompt` or `messages`, with `system` and `files`."""

import copy
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import msgspec

from rolltape.collect.environments.protocol import Message, Opening, Tool
from rolltape.errors import TaskError
from rolltape.records.jsonable import shown

_ROLES = ("system", "developer", "user", "assistant", "tool")


class Prompted(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that every kind of task may have."""

    prompt: str | None = None  # a user message
    messages: list[dict[str, Any]] | None = None  # instead: a conversation in chat form
    system: str | None = None  # put before it
    files: dict[str, str] = {}  # for the working directory of an agent that has one


def check_prompt(fields: Prompted, *, needed: bool = True) -> None:
    """TaskError unless there is something to say first, said in one way."""
    if fields.prompt is not None and fields.messages is not None:
        raise TaskError("it has both a prompt and messages; keep one of them")
    if fields.messages is not None:
        _check_messages(fields.messages, fields.system)
    elif fields.prompt is not None and not fields.prompt.strip():
        raise TaskError("its prompt is empty; say what is asked")
    elif fields.prompt is None and needed:
        raise TaskError('it has no prompt; add "prompt" (text) or "messages" (a list of them)')
    for name in fields.files:
        check_path(name, "its files")


def check_path(name: str, where: str) -> None:
    """TaskError for a file name that leads out of the working directory, or nowhere."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path == PurePosixPath() or "\0" in name:
        raise TaskError(f"{where}: {shown(name)} is no file of the working directory; give a relative path below it")


def opening_of(fields: Prompted, tools: Sequence[Tool] = (), max_tool_calls: int | None = None) -> Opening:
    """What the agent is told first; a fresh copy on every call."""
    messages: list[Message] = [] if fields.system is None else [{"role": "system", "content": fields.system}]
    if fields.messages is not None:
        messages += copy.deepcopy(fields.messages)
    elif fields.prompt is not None:
        messages.append(user(fields.prompt))
    return Opening(messages=messages, tools=tuple(tools), files=dict(fields.files), max_tool_calls=max_tool_calls)


def user(text: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": text}


def _check_messages(messages: list[dict[str, Any]], system: str | None) -> None:
    if not messages:
        raise TaskError("its messages are an empty list; give at least one")
    for number, message in enumerate(messages, 1):
        if message.get("role") not in _ROLES:
            roles = ", ".join(_ROLES)
            raise TaskError(f"its message {number} has the role {shown(message.get('role'))}; there are {roles}")
        if not isinstance(message.get("content"), str | list | None):
            raise TaskError(f"its message {number} has the content {shown(message['content'])}; give text")
    if system is not None and messages[0]["role"] in ("system", "developer"):
        raise TaskError("it has a system text, and its messages begin with another; keep one of them")
