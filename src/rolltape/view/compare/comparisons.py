"""`Comparisons`: the comparisons that a server was last asked for, kept until a run changes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rolltape.errors import NoAnswer
from rolltape.view.answers import parse_number
from rolltape.view.compare.comparison import TaskComparison
from rolltape.view.compare.sides import parse_side
from rolltape.view.run.listing import Query
from rolltape.view.run.run_answers import RunAnswers
from rolltape.view.served_runs import ServedRun

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


@contextmanager
def comparing(a: str, b: str, query: Query) -> Iterator[Callable[[Query], dict[str, Any]]]:
    """Compare two runs by their locations, as they are now: a function that answers a query that adds to this one."""
    names = {a: "a"} | ({b: "b"} if b != a else {})
    runs = {name: ServedRun(name, location) for location, name in names.items()}
    try:
        for run in runs.values():
            run.index.advance()
        answers = {name: RunAnswers(run) for name, run in runs.items()}
        comparisons = Comparisons()
        sides = {"a": names[a], "b": names[b]}
        yield lambda more: comparisons.answer({**query, **sides, **more}, answers)
    finally:
        for run in runs.values():
            run.close()
