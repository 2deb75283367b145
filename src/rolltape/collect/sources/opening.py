"""The text that names a source → its tasks, checked, in the order in which to launch them."""

import os
import re
import sys
from collections.abc import Collection
from itertools import islice
from pathlib import Path

import msgspec

from rolltape.collect.functions import PREFIX
from rolltape.collect.sources.checking import Check, checked_tasks
from rolltape.collect.sources.entries import Reading
from rolltape.collect.sources.jsonfiles import json_file, json_lines_file, json_lines_stream
from rolltape.collect.sources.made import function_source
from rolltape.collect.sources.source import Source, shuffled
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
    check: Check | None = None,
) -> Source:
    """Read and check the tasks of a source; raises a TaskError that names every place where something is wrong.

    `name` stands for the file's own name in the ids of rollouts. Without `environments`, any is taken; `check`
    raises a TaskError for a task that its environment cannot use. With a limit and no shuffle, what lies behind
    the limit is not read.
    """
    if limit is not None and limit < 1:
        raise SourceError(f"a limit of {limit} leaves no task; give 1 or more, or none for all")
    reading = _reading(os.fspath(text), split)
    if name is not None:
        reading = msgspec.structs.replace(reading, name=name)
    entries = reading.entries if shuffle_seed is not None else islice(reading.entries, limit)
    source = Source(reading.source)
    keys = []
    for key, task in checked_tasks(reading, entries, environments=environments, check=check):
        source.keep(task)
        keys.append(key)
    order = range(len(keys)) if shuffle_seed is None else shuffled(keys, shuffle_seed)
    source.arrange(order[:limit])
    return source


def _reading(text: str, split: str | None) -> Reading:
    path = Path(text)
    if text == "-":
        return json_lines_stream(sys.stdin.buffer, split)
    if text.startswith(PREFIX):
        return function_source(text, split)
    if path.suffix in _FILES and not path.is_dir():
        return _FILES[path.suffix](text, split)
    # Arrow takes a tenth of a second to import, and only tables need it.
    from rolltape.collect.sources.tables import dataset_directory, hub_dataset, parquet_file

    if path.is_dir():
        return dataset_directory(text, split)
    if path.suffix == ".parquet":
        return parquet_file(text, split)
    if path.exists():
        raise SourceError(f"{text} is no kind of task file; there are .json, .jsonl, .parquet and dataset directories")
    if not _HUB_NAME.fullmatch(text) or ("/" in text and path.parent.exists()):
        raise SourceError(f"{text}: there is no such file or directory; check the path")
    # A mistyped path must not go out to the hub, and a dataset there is named with its split.
    if split is None:
        raise SourceError(
            f"{text}: there is no such file or directory; if it is a dataset on the Hugging Face hub, "
            "name its split too with --split"
        )
    return hub_dataset(text, split)
