"""What a forked child does at once about objects of its parent, such as threads, locks and open files."""

import os
from collections.abc import Callable
from weakref import WeakMethod

_calls: dict["WeakMethod[Callable[[], None]]", None] = {}


def call_in_child(method: Callable[[], None]) -> None:
    """Call a bound method in every forked child, as long as its object lives in the parent."""
    _calls[WeakMethod(method, _forget)] = None


def _forget(call: "WeakMethod[Callable[[], None]]") -> None:
    _calls.pop(call, None)


def _after_fork() -> None:
    for call in list(_calls):
        method = call()
        if method is not None:
            method()


os.register_at_fork(after_in_child=_after_fork)
