"""`Side`: one side of a comparison: rollouts of a run, all of them or those of a step, a weight version or a model."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from rolltape.errors import NoAnswer
from rolltape.view.run.listing import Listing, Query
from rolltape.view.run.rows import Array
from rolltape.view.run.run_answers import RunAnswers, find_run_answers

_STEPS = re.compile(r"(\d{1,15})(?:-(\d{1,15}))?")
# Filters of the table by which a part of a run can be selected.
_TEXTS = ("model", "agent", "environment", "source", "tag")
_FILTERS = ("step", "version", *_TEXTS)
_MOST_LISTED = 500


class Side(NamedTuple):
    """The rollouts on one side."""

    letter: str  # "a" or "b"
    r: str  # the run's name in addresses
    title: str
    filters: dict[str, str]
    listing: Listing
    rows: Array

    def about(self) -> dict[str, Any]:
        """The compared part of the run, and the other values that could be selected."""
        columns, texts = self.listing.state.rows.columns, self.listing.state.rows.texts
        steps = np.unique(columns["step"])
        listed = {
            name: sorted(one for one in (texts[name].values[code] for code in np.unique(columns[name])) if one)
            for name in _TEXTS
            if name != "tag"
        }
        rewards = self.listing.rewards[self.rows]
        rewards = rewards[np.isfinite(rewards)]
        return {
            "r": self.r,
            "name": self.title,
            "filters": self.filters,
            "rollouts": len(self.rows),
            "attempts": len(rewards),
            "mean": float(rewards.mean()) if len(rewards) else None,  # over attempts, also at unpaired tasks
            "steps": steps[:_MOST_LISTED].tolist(),
            "versions": list(self.listing.versions[-_MOST_LISTED:]),
            **{f"{name}s": values[:_MOST_LISTED] for name, values in listed.items()},
            "progress": self.listing.progress,
        }


def parse_side(query: Query, letter: str, runs: Mapping[str, RunAnswers]) -> Side:
    """The side of a query: `a` names the run, `a_step`, `a_version`, `a_model`… narrow it."""
    answers = find_run_answers(runs, query.get(letter, ""))
    filters = {}
    for name, value in query.items():
        if name.startswith(f"{letter}_") and value:
            if name[2:] not in _FILTERS:
                raise NoAnswer(f"{name[:40]} is not a filter; give {', '.join(f'{letter}_{one}' for one in _FILTERS)}")
            filters[name[2:]] = value
    listing = answers.listing()
    return Side(letter, answers.run.name, answers.run.title, filters, listing, _matching(listing, filters, letter))


def _matching(listing: Listing, filters: dict[str, str], letter: str) -> Array:
    rows = listing.matching({name: filters[name] for name in _TEXTS if name in filters}, None)
    columns = listing.state.rows.columns
    if "step" in filters:
        parts = _STEPS.fullmatch(filters["step"])
        if parts is None:
            raise NoAnswer(f"{letter}_step is {filters['step'][:40]!r}; give a step, or the first and last: 10-19")
        steps = columns["step"][rows]
        rows = rows[(steps >= int(parts[1])) & (steps <= int(parts[2] or parts[1]))]
    if "version" in filters:
        lists = listing.state.rows.lists("versions")
        used = np.array([one is not None and filters["version"] in one for one in lists])
        rows = rows[used[columns["versions"][rows]]]
    return rows
