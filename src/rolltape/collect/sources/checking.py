"""Entries → tasks. Every entry is checked before anything runs, and one error names all that is wrong."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from rolltape.collect.sources.entries import SHOWN_PROBLEMS, RawSource, SourceEntry, describe_problems, join_names
from rolltape.collect.tasks import Task, environment_name, id_text
from rolltape.errors import BadTasks, NotJsonError, SourceError, TaskError
from rolltape.records.jsonable import encode_with_text_keys, shown
from rolltape.tape.recording.fields import is_unicode

_KINDS = {type(None): "null", bool: "a truth value", int: "a number", float: "a number", str: "text", list: "a list"}

CheckTask = Callable[[Task], None]  # raises TaskError for a task that cannot be used


def check_tasks(
    raw: RawSource, entries: Iterable[SourceEntry], *, environments: Collection[str] | None, check: CheckTask | None
) -> Iterator[tuple[bytes, Task]]:
    """Each task with its key. After the last one, raise BadTasks if any entry could not be used."""
    first_places: dict[bytes, str] = {}
    problems: list[str] = []
    count = 0
    for entry in entries:
        try:
            task = _parse_task(entry, raw, environments)
            key = task.key
            if key in first_places:
                raise TaskError(_describe_repeat(task, first_places[key]))
            if check is not None:
                check(task)
        except TaskError as error:
            count += 1
            if count <= SHOWN_PROBLEMS:
                problems.append(f"{entry.where}: {error}")
        else:
            first_places[key] = entry.where
            yield key, task
    if count:
        raise BadTasks(describe_problems(raw.label, problems, count, "nothing was run"), tuple(problems), count)
    if not first_places:
        raise SourceError(f"{raw.label} is empty: there is no task in it")


def _parse_task(entry: SourceEntry, raw: RawSource, environments: Collection[str] | None) -> Task:
    if entry.problem is not None:
        raise TaskError(entry.problem)
    given, places = entry.value, {"source": raw.joined_name, "where": f"{raw.label}, {entry.where}"}
    data = given.data if isinstance(given, Task) else given
    if not isinstance(data, dict):
        raise TaskError(
            f'this is {_describe_kind(data)}; a task is an object, such as {{"id": "a", "question": "..."}}'
        )
    _check_json(data)
    if isinstance(given, Task):
        _check_json({"id": given.id, "environment": given.environment})
        own_id, environment = id_text(given.id), environment_name(given.environment)
        task = Task(id=own_id, environment=environment, data=data, **places)
    else:
        task = Task.from_entry(data, **places)
    if environments is not None and task.environment is not None and task.environment not in environments:
        raise TaskError(f"there is no environment {task.environment!r}; there are {join_names(environments)}")
    return task


def _describe_kind(value: object) -> str:
    return _KINDS.get(type(value)) or f"of type {type(value).__name__}"


def _describe_repeat(task: Task, first_place: str) -> str:
    if task.id is None:
        return f"it is the same as {first_place}, and neither has an id; remove one, or give each its own id"
    return f"its id {task.id!r} is that of {first_place} already; give each task its own id"


def _check_json(value: object) -> None:
    """Refuse what JSON cannot hold exactly: NaN, text that is not Unicode, bytes, dates, keys that are not text."""
    try:
        repaired = encode_with_text_keys(value, "it")[1]
    except NotJsonError as error:
        raise TaskError(_find_fault(value, "") or str(error)) from None
    if repaired:
        raise TaskError(_find_fault(value, "") or "text in it is not valid Unicode; correct it")


def _find_fault(value: object, path: str) -> str | None:
    match value:
        case Mapping():
            keys = (_find_key_fault(key, path) for key in value)
            inner = (_find_fault(item, f"{path}.{key}" if path else str(key)) for key, item in value.items())
            return next(filter(None, keys), None) or next(filter(None, inner), None)
        case list() | tuple():
            return next(filter(None, (_find_fault(item, f"{path}[{at}]") for at, item in enumerate(value))), None)
        case float() if not math.isfinite(value):
            return f"{path} is {value!r}, which JSON has no number for; write null, text or a finite number"
        case str() if not is_unicode(value):
            return f"{path} is {shown(value)}, half of a character; write the whole character"
        case None | str() | int() | float():
            return None
        case _:
            return f"{path} is of type {type(value).__name__}, which is not JSON; make it text, a number or a list"


def _find_key_fault(key: object, path: str) -> str | None:
    of = f" of {path}" if path else ""
    if not isinstance(key, str):
        return f"the key {key!r}{of} is of type {type(key).__name__}; JSON has only text keys"
    return None if is_unicode(key) else f"the key {key!r}{of} has half of a character; write the whole character"
