"""Filters after collection: rules judge rollouts, and what changes by that is said on the tape.

verdicts = no_spread(run.index())
tape.say_all(changes(run, verdicts, by=NO_SPREAD))
"""

from rolltape.collect.filters.changes import changes, standing, undone
from rolltape.collect.filters.rejecting import reject_named, rejected
from rolltape.collect.filters.rules import NO_SPREAD, STALE, Verdict, no_spread, stale

__all__ = [
    "NO_SPREAD",
    "STALE",
    "Verdict",
    "changes",
    "no_spread",
    "reject_named",
    "rejected",
    "stale",
    "standing",
    "undone",
]
