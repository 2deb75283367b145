"""`Comparisons`: the comparisons that a server was last asked for, kept until a run changes."""

from collections.abc import Mapping
from typing import Any

from rolltape.errors import NoAnswer
from rolltape.view.answers import parse_number
from rolltape.view.compare.comparison import TaskComparison
from rolltape.view.compare.sides import parse_side
from rolltape.view.run.listing import Query
from rolltape.view.run.run_answers import RunAnswers

_HELD = 4
_PAIRED_BY = ("source", "task")


class Comparisons:
    """Compares sides of runs. To sort or filter the same comparison again costs little."""

    def __init__(self) -> None:
        self._held: dict[object, TaskComparison] = {}

    def answer(self, query: Query, runs: Mapping[str, RunAnswers]) -> dict[str, Any]:
        """The comparison that a query asks for; tasks are paired by source and id, or with `by=task` by id alone."""
        a, b = (parse_side(query, letter, runs) for letter in ("a", "b"))
        by = query.get("by") or "source"
        if by not in _PAIRED_BY:
            raise NoAnswer(f"by is {by[:40]!r}; give {' or '.join(_PAIRED_BY)}")
        solved_at = parse_number(query, "solved_at")
        own = tuple((side.r, side.listing.snapshot, tuple(sorted(side.filters.items()))) for side in (a, b))
        key = (own, by, solved_at)
        if key not in self._held:
            while len(self._held) >= _HELD:
                del self._held[next(iter(self._held))]
            self._held[key] = TaskComparison((a, b), solved_at=solved_at, by_source=by == "source")
        return self._held[key].answer(query)
