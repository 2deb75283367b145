"""A task's entry → the fields that its environment knows, checked."""

import copy
from typing import Any, TypeVar

import msgspec

from rolltape.collect.tasks import Task
from rolltape.errors import TaskError

T = TypeVar("T")

_AT = " - at `$"


def fields_of(task: Task, kind: type[T]) -> T:
    """The fields of `kind` out of a task, sharing nothing with it. Null is the same as absent; others are ignored."""
    known = kind.__struct_fields__  # type: ignore[attr-defined]
    given = {name: _without_nulls(value) for name, value in task.data.items() if name in known and value is not None}
    if given.get("messages") is not None:
        given["messages"] = copy.deepcopy(task.data["messages"])  # a message may say null, and mean it
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise TaskError(_told(str(error))) from None


def entry_of(task: Task) -> dict[str, Any]:
    """The whole entry, for a function that may do with it what it likes."""
    return copy.deepcopy(task.data)


def _without_nulls(value: Any) -> Any:
    # Columns of a table give every row the fields of all rows.
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def _told(message: str) -> str:
    what, _, path = message.partition(_AT)
    what = what[:1].lower() + what[1:]
    where = path.rstrip("`").removeprefix(".")
    return f"its {where}: {what}; correct it" if where else f"it is not as its environment needs it: {what}"
