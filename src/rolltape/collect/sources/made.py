"""Entries that a Python function makes."""

import inspect
from collections.abc import Iterable, Iterator

from rolltape.collect.functions import function_named
from rolltape.collect.sources.entries import Entry, Reading
from rolltape.errors import SourceError


def function_source(label: str, split: str | None) -> Reading:
    """What the function returns or yields: objects or Tasks. Called once, with `split` if that is given.

    What the function raises travels on.
    """
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
    return Reading(label, split, label, _items(made))


def _items(made: Iterable[object]) -> Iterator[Entry]:
    for number, value in enumerate(made, 1):
        yield Entry(f"item {number}", value)
