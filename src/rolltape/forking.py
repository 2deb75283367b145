"""What a forked child does at once about objects of its parent, such as threads, locks and open files."""

import os
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

_calls: "WeakKeyDictionary[Any, Callable[[Any], None]]" = WeakKeyDictionary()


def call_in_child(owner: T, call: Callable[[T], None]) -> None:
    """Call a function of an object in every forked child, as long as the object lives."""
    _calls[owner] = call


def _after_fork() -> None:
    for owner, call in list(_calls.items()):
        call(owner)


os.register_at_fork(after_in_child=_after_fork)
