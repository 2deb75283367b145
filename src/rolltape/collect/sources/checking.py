"""Entries → tasks: every one of them checked before the first is run, and what is wrong with them said at once."""

from collections.abc import Callable, Collection, Iterable, Iterator

from rolltape.collect.sources.entries import SHOWN_PROBLEMS, Entry, Reading, all_told, listed
from rolltape.collect.sources.plain import check_plain
from rolltape.collect.tasks import Task, environment_name, id_text
from rolltape.errors import BadTasks, SourceError, TaskError

Check = Callable[[Task], None]


def checked_tasks(
    reading: Reading, entries: Iterable[Entry], *, environments: Collection[str] | None, check: Check | None
) -> Iterator[tuple[bytes, Task]]:
    """Each task with its key. At the end all that was wrong is raised as one error."""
    first_places: dict[bytes, str] = {}
    problems: list[str] = []
    count = 0
    for entry in entries:
        try:
            task = _task_of(entry, reading, environments)
            key = task.key
            if key in first_places:
                raise TaskError(_repeated(task, first_places[key]))
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
        raise BadTasks(all_told(reading.label, problems, count, "nothing was run"), tuple(problems), count)
    if not first_places:
        raise SourceError(f"{reading.label} is empty: there is no task in it")


def _task_of(entry: Entry, reading: Reading, environments: Collection[str] | None) -> Task:
    if entry.problem is not None:
        raise TaskError(entry.problem)
    given, places = entry.value, {"source": reading.source, "where": f"{reading.label}, {entry.where}"}
    data = given.data if isinstance(given, Task) else given
    if not isinstance(data, dict):
        raise TaskError(f'this is {_kind(data)}; a task is an object, such as {{"id": "a", "question": "..."}}')
    check_plain(data)
    if isinstance(given, Task):
        check_plain({"id": given.id, "environment": given.environment})
        own_id, environment = id_text(given.id), environment_name(given.environment)
        task = Task(id=own_id, environment=environment, data=data, **places)
    else:
        task = Task.of_entry(data, **places)
    if environments is not None and task.environment is not None and task.environment not in environments:
        raise TaskError(f"there is no environment {task.environment!r}; there are {listed(environments)}")
    return task


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a truth value"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list():
            return "a list"
        case _:
            return f"of type {type(value).__name__}"


def _repeated(task: Task, first_place: str) -> str:
    if task.id is None:
        return f"it is the same as {first_place}, and neither has an id; remove one, or give each its own id"
    return f"its id {task.id!r} is that of {first_place} already; give each task its own id"
