"""`open_source`: the text that names a source → its tasks, checked, in the order in which to launch them."""

import inspect
import os
import re
import sys
from collections.abc import Collection, Iterable
from itertools import islice
from pathlib import Path

import msgspec

from rolltape.collect.functions import PREFIX, function_named
from rolltape.collect.sources.checking import CheckTask, check_tasks
from rolltape.collect.sources.entries import RawSource, SourceEntry
from rolltape.collect.sources.jsonfiles import json_file, json_lines_file, json_lines_stream
from rolltape.collect.sources.source import TaskSource, shuffled
from rolltape.errors import SourceError

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
    dataset on the Hugging Face hub ("owner/name", "owner/name:configuration"), or "python:module:function". `split`
    names a split of it. `name` replaces the file's own name in the ids of rollouts. Without `environments`, tasks may
    name any environment. `check` raises a TaskError for a task that its environment cannot use.

    With a limit and without a shuffle, entries behind the limit are not read. Raises a TaskError that names every
    place where something is wrong.
    """
    if limit is not None and limit < 1:
        raise SourceError(f"a limit of {limit} leaves no task; give 1 or more, or none for all")
    raw = _read(os.fspath(text), split)
    if name is not None:
        raw = msgspec.structs.replace(raw, name=name)
    entries = raw.entries if shuffle_seed is not None else islice(raw.entries, limit)
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
    # A mistyped path must not go out to the hub, and a dataset there is named with its split.
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
    made = function(**arguments)
    if not isinstance(made, Iterable) or isinstance(made, str | bytes | dict):
        raise SourceError(
            f"{label} returned something of type {type(made).__name__}; return a list of objects, or yield them"
        )
    return RawSource(label, split, label, (SourceEntry(f"item {at}", value) for at, value in enumerate(made, 1)))
