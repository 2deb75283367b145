"""Filters: rules that keep rollouts out of training after they were collected, as events on the tape.

verdicts = no_spread(run.index())
tape.append_events(changes(run, verdicts, by=NO_SPREAD))
"""

import warnings
from typing import Any

from rolltape.collect.filters.changes import active_filters, changes, undone
from rolltape.collect.filters.rules import NO_SPREAD, STALE, Verdict, no_spread, reject_named, rejected, stale

__all__ = [
    "NO_SPREAD",
    "STALE",
    "Verdict",
    "active_filters",
    "changes",
    "no_spread",
    "reject_named",
    "rejected",
    "stale",
    "undone",
]


def __getattr__(name: str) -> Any:
    if name == "standing":
        warnings.warn("rolltape.collect.filters.standing is now active_filters", DeprecationWarning, stacklevel=2)
        return active_filters
    raise AttributeError(f"module 'rolltape.collect.filters' has no attribute {name!r}")
