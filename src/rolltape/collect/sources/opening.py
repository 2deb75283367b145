"""`open_source`: read the tasks of a source, in the order of their launch.

Every entry is checked before anything runs, and one error names all problems.
"""

import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from rolltape.collect.environments import environment_named, is_of_other_project
from rolltape.collect.functions import PREFIX, describe_raised, function_named
from rolltape.collect.sources.entries import EntryProblems, RawSource, SourceEntry, join_names
from rolltape.collect.sources.harbor import PREFIX as HARBOR
from rolltape.collect.sources.harbor import harbor_folder, is_harbor_folder
from rolltape.collect.sources.jsonfiles import json_file, json_lines_file, json_lines_stream
from rolltape.collect.tasks import Task, TaskSource, environment_name, id_text, shuffled
from rolltape.errors import BadTasks, NotJsonError, RolltapeError, SourceError, TaskError
from rolltape.records.jsonable import encode_with_text_keys, shown
from rolltape.tape.recording.fields import is_unicode

_KINDS = {type(None): "null", bool: "a truth value", int: "a number", float: "a number", str: "text", list: "a list"}

CheckTask = Callable[[Task], None]  # raises TaskError for a task that cannot be used

_FILES = {".json": json_file, ".jsonl": json_lines_file}
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(:[\w.-]+)?")


def open_source(
    text: str | os.PathLike[str],
    *,
    split: str | None = None,
    limit: int | None = None,
    shuffle_seed: int | None = None,
    name: str | None = None,
    environments: Collection[str] | None = None,
    check: CheckTask | None = None,
) -> TaskSource:
    """Read and check the tasks of a source.

    `text` is a .json, .jsonl or .parquet file, "-" for standard input, the directory of a dataset, the name of a
    dataset on the Hugging Face hub ("owner/name", "owner/name:configuration"), "python:module:function", a folder with
    tasks of Harbor ("harbor:FOLDER", or without the prefix), or an environment of another project that brings its own
    tasks ("verifiers:NAME"). `split` names a split of it. `name` replaces the file's own name in the ids of rollouts.
    Without `environments`, tasks may name any environment. `check` raises a TaskError for a task that its environment
    cannot use.

    With a limit and without a shuffle, entries after the limit are not read. Raises a TaskError that names the place
    of every problem.
    """
    if limit is not None and limit < 1:
        raise SourceError(f"a limit of {limit} leaves no task; give 1 or more, or none for all")
    raw = _read(os.fspath(text), split)
    if name is not None:
        raw = msgspec.structs.replace(raw, name=name)
    if raw.is_endless and limit is None:
        raise SourceError(f"{raw.label} has no last task; give --limit")
    entries = raw.entries if shuffle_seed is not None and not raw.is_endless else islice(raw.entries, limit)
    source = TaskSource(raw.joined_name)
    keys = []
    for key, task in check_tasks(raw, entries, environments=environments, check=check):
        source.add(task)
        keys.append(key)
    order = range(len(keys)) if shuffle_seed is None else shuffled(keys, shuffle_seed)
    source.arrange(order[:limit])
    return source


def _read(text: str, split: str | None) -> RawSource:
    path = Path(text)
    if text == "-":
        return json_lines_stream(sys.stdin.buffer, split)
    if text.startswith(PREFIX):
        return _call_function(text, split)
    if is_of_other_project(text):
        return _take_own_tasks(text, split)
    if text.startswith(HARBOR) or (path.is_dir() and is_harbor_folder(path)):
        return harbor_folder(text, split)
    if path.suffix in _FILES and not path.is_dir():
        return _FILES[path.suffix](text, split)
    # Arrow takes a tenth of a second to import, and only tables need it.
    from rolltape.collect.sources.tables import dataset_directory, hub_dataset, parquet_file

    if path.is_dir():
        return dataset_directory(text, split)
    if path.suffix == ".parquet":
        return parquet_file(text, split)
    if path.exists():
        raise SourceError(f"{text} is not a task file; there are .json, .jsonl, .parquet and dataset directories")
    if not _HUB_NAME.fullmatch(text) or ("/" in text and path.parent.exists()):
        raise SourceError(f"{text}: there is no such file or directory; check the path")
    # A mistyped path must not be sent to the hub, so a dataset there needs a split.
    if split is None:
        raise SourceError(
            f"{text}: there is no such file or directory; if it is a dataset on the Hugging Face hub, "
            "name its split too with --split"
        )
    return hub_dataset(text, split)


def _call_function(label: str, split: str | None) -> RawSource:
    """Call the function once, with `split` if that is given. It returns or yields objects or Tasks."""
    function = function_named(label)
    arguments = {} if split is None else {"split": split}
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        given = "without arguments" if split is None else f"with split={split!r}"
        raise SourceError(f"{label} cannot be called {given}: {error}; change --split or the function") from None
    with _naming_errors(label):
        made = function(**arguments)
    if not isinstance(made, Iterable) or isinstance(made, str | bytes | dict):
        raise SourceError(
            f"{label} returned something of type {type(made).__name__}; return a list of objects, or yield them"
        )
    return RawSource(label, split, label, _number("item", made, label))


def _take_own_tasks(name: str, split: str | None) -> RawSource:
    """The tasks of another project's environment, such as `verifiers:NAME`."""
    environment = environment_named(name)
    tasks = getattr(environment, "tasks", None)
    if tasks is None:
        raise SourceError(f"{name} brings no tasks of its own; give a file of tasks, and --environment {name}")
    with _naming_errors(name):
        made = tasks(split)
    is_endless = bool(getattr(environment, "is_endless", False))
    return RawSource(name, split, name, _number("task", made, name), is_endless)


def _number(kind: str, values: Iterable[object], label: str) -> Iterator[SourceEntry]:
    """Values from the user's code as entries with their places."""
    with _naming_errors(label):
        for at, value in enumerate(values, 1):
            yield SourceEntry(f"{kind} {at}", value)


@contextmanager
def _naming_errors(label: str) -> Iterator[None]:
    """Turn errors of the user's code into a SourceError that names the code and the place."""
    try:
        yield
    except RolltapeError:
        raise
    except Exception as error:
        raise SourceError(f"{label} raised {describe_raised(error)}; correct it") from error


class GivenSource(TaskSource):
    """A source that is empty at first: its tasks come one by one while a collection runs, such as from a trainer."""

    def __init__(self, name: str, split: str | None, check: CheckTask) -> None:
        self._raw = RawSource(name, split, name, ())
        self._check = check
        self._indexes: dict[bytes, int] = {}
        super().__init__(self._raw.joined_name)

    def give(self, value: Mapping[str, Any] | Task) -> int:
        """Check a task, add it, and return its position. TaskError for one that was given before."""
        index = len(self)
        entry = SourceEntry(f"task {index + 1}", value if isinstance(value, Task) else dict(value))
        ((key, task),) = check_tasks(self._raw, [entry], environments=None, check=self._check)
        if (before := self._indexes.setdefault(key, index)) != index:
            raise TaskError(f"{task.where}: it is the same as task {before + 1}; give each task its own id")
        self.add(task)
        self.arrange(range(index + 1))
        return index


def check_tasks(
    raw: RawSource, entries: Iterable[SourceEntry], *, environments: Collection[str] | None, check: CheckTask | None
) -> Iterator[tuple[bytes, Task]]:
    """Yield each task with its key. After the last one, raise BadTasks if any entry could not be used."""
    first_places: dict[bytes, str] = {}
    problems = EntryProblems()
    for entry in entries:
        try:
            task = _parse_task(entry, raw, environments)
            key = task.key
            if key in first_places:
                raise TaskError(_describe_repeat(task, first_places[key]))
            if check is not None:
                check(task)
        except TaskError as error:
            problems.add(entry, error)
        except RolltapeError:
            raise
        except Exception as error:  # noqa: BLE001 - anybody's environment
            problems.add(entry, TaskError(f"its environment's check raised {describe_raised(error)}; correct it"))
        else:
            first_places[key] = entry.where
            yield key, task
    if problems.count:
        raise BadTasks(problems.describe(raw.label, "nothing was run"), tuple(problems.first), problems.count)
    if not first_places:
        raise SourceError(f"{raw.label} is empty: there is no task in it; give a source with tasks")


def _parse_task(entry: SourceEntry, raw: RawSource, environments: Collection[str] | None) -> Task:
    if entry.problem is not None:
        raise TaskError(entry.problem)
    given, places = entry.value, {"source": raw.joined_name, "where": f"{raw.label}, {entry.where}"}
    data = given.data if isinstance(given, Task) else given
    if not isinstance(data, dict):
        raise TaskError(f'this is {_describe_kind(data)}; a task is an object, such as {{"id": "a", "prompt": "..."}}')
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
