"""Read a task's entry: the checked fields that its environment knows, and the opening messages from them."""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from rolltape.collect.environments.protocol import Message, Opening, Tool
from rolltape.collect.tasks import Task
from rolltape.errors import TaskError
from rolltape.records.jsonable import shown

T = TypeVar("T")

_STEP = re.compile(r"\.\w+|\[")  # of the path to a value
# Fields that environments score by. An agent must not see them.
_SCORING_FIELDS = frozenset({"answer", "check", "unfinished", "criteria", "scale", "better", "judge", "harbor"})
_ROLES = ("system", "developer", "user", "assistant", "tool")


class PromptFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that every kind of task may have."""

    prompt: str | None = None  # a user message
    messages: list[dict[str, Any]] | None = None  # instead of `prompt`: a conversation in chat form
    system: str | None = None  # a system message before it
    files: dict[str, str] = {}  # for the working directory of an agent that has one


def parse_fields(task: Task, kind: type[T]) -> T:
    """The fields of `kind` from a task, as a copy. Null means absent; other fields are ignored."""
    known = kind.__struct_fields__  # type: ignore[attr-defined]
    given = {name: _without_nulls(value) for name, value in task.data.items() if name in known and value is not None}
    if given.get("messages") is not None:
        given["messages"] = copy.deepcopy(task.data["messages"])  # null has a meaning within a message
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise TaskError(_describe_error(str(error), kind)) from None


def copy_entry(task: Task) -> dict[str, Any]:
    """A copy of the whole entry, for a function that may change it."""
    return copy.deepcopy(task.data)


def without_answers(task: Mapping[str, Any]) -> dict[str, Any]:
    """A task's entry without the fields for scoring, such as its answer and its hidden tests."""
    return {name: value for name, value in task.items() if name not in _SCORING_FIELDS}


def check_prompt(fields: PromptFields, *, needed: bool = True) -> None:
    """Raise TaskError unless the task has either a prompt or messages."""
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
    """Raise TaskError for a file name that is not inside the working directory."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path == PurePosixPath() or "\0" in name:
        raise TaskError(f"{where}: {shown(name)} is not in the working directory; give a relative path below it")


def build_opening(fields: PromptFields, tools: Sequence[Tool] = (), max_tool_calls: int | None = None) -> Opening:
    """The opening of a task, as a new copy on every call."""
    messages = system_messages(fields.system)
    if fields.messages is not None:
        messages += copy.deepcopy(fields.messages)
    elif fields.prompt is not None:
        messages.append(user_message(fields.prompt))
    return Opening(messages=messages, tools=tuple(tools), files=dict(fields.files), max_tool_calls=max_tool_calls)


def user_message(text: str) -> Message:
    return {"role": "user", "content": text}


def system_messages(text: str | None) -> list[Message]:
    """A list with the system message of a text; empty for None."""
    return [] if text is None else [{"role": "system", "content": text}]


def _check_messages(messages: list[dict[str, Any]], system: str | None) -> None:
    if not messages:
        raise TaskError("its messages are an empty list; give at least one")
    for number, message in enumerate(messages, 1):
        if message.get("role") not in _ROLES:
            roles = ", ".join(_ROLES)
            raise TaskError(f"its message {number} has the role {shown(message.get('role'))}; there are {roles}")
        content = message.get("content")
        if not isinstance(content, str | list | None) or (content is None and message["role"] != "assistant"):
            raise TaskError(f"its message {number} has the content {shown(content)}; give text")
    if system is not None and messages[0]["role"] in ("system", "developer"):
        raise TaskError("it has a system text, and its messages begin with another; keep one of them")


def _without_nulls(value: Any) -> Any:
    # In a table, every row has the fields of all rows.
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def _describe_error(message: str, kind: type) -> str:
    what, _, path = message.partition(" - at `")
    what = what[:1].lower() + what[1:]
    inside, _, where = path.rstrip("`").rpartition("$")
    steps = _STEP.findall(where) + (["key"] if inside else [])
    choices = " or ".join(_find_choices(inspect.type_info(kind), steps)) if what.startswith("invalid enum") else ""
    subject = f"{'a key of ' if inside else ''}its {where.removeprefix('.')}" if where else "its fields"
    return f"{subject}: {what}; {f'give {choices}' if choices else 'correct it'}"


def _find_choices(kind: inspect.Type, steps: Sequence[str]) -> Iterator[str]:
    """What is allowed at the end of a path: steps are `.name`, `[` for an item, and `key`."""
    match kind, steps:
        case inspect.UnionType(types=types), _:
            for one in types:
                yield from _find_choices(one, steps)
        case inspect.StructType(fields=fields), [name, *rest]:
            for field in fields:
                if name == f".{field.encode_name}":
                    yield from _find_choices(field.type, rest)
        case inspect.DictType(key_type=inner), ["key"]:
            yield from _find_choices(inner, [])
        case ((inspect.DictType(value_type=inner) | inspect.ListType(item_type=inner)), ["[", *rest]):
            yield from _find_choices(inner, rest)
        case inspect.LiteralType(values=values), []:
            yield from map(repr, values)
        case inspect.EnumType(cls=cls), []:
            yield from (repr(one.value) for one in cls)
        case inspect.FloatType(), []:
            yield "a number"
        case inspect.DictType(), []:
            yield "an object"
