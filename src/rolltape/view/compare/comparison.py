"""`TaskComparison`: two sides task by task, paired by source and id; `Comparisons` caches the latest ones."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from rolltape.errors import NoAnswer
from rolltape.view.answers import number_or_none, parse_number, parse_page, parse_sort, to_plain
from rolltape.view.compare.sides import Side, parse_side
from rolltape.view.compare.significance import METHOD, is_same, paired_test
from rolltape.view.run.listing import Query
from rolltape.view.run.rows import Array
from rolltape.view.run.run_answers import RunAnswers
from rolltape.view.run.tasks import divided, solved_limit
from rolltape.view.served_runs import ServedRun

_WHICH = ("higher", "lower", "same", "only_a", "only_b", "unrewarded")
_TERM = "term."
_HELD = 4  # comparisons
_PAIRED_BY = ("source", "task")


class TaskComparison:
    """The tasks of two sides, with the results of each side's attempts. Only rollouts with a finite reward count."""

    def __init__(self, sides: tuple[Side, Side], *, solved_at: float | None = None, by_source: bool = True) -> None:
        self.sides = sides
        self.by_source = by_source
        rewards = np.concatenate([side.listing.rewards[side.rows] for side in sides])
        self.solved_at = solved_limit(rewards[np.isfinite(rewards)]) if solved_at is None else solved_at
        self.names: list[tuple[str | None, str]] = []  # source and task
        self._tasks: list[Array] = self._pair()
        self._kept = [tasks >= 0 for tasks in self._tasks]
        self.rollouts = [self._count(at, self._kept[at]) for at in (0, 1)]
        self.attempts = [self._count(at, self._rewarded(at)) for at in (0, 1)]
        self.solved = [self._sum(at, "solved")[0] for at in (0, 1)]

    def _pair(self) -> list[Array]:
        """For each side, the number of each rollout's task, the same on both sides; -1 for a task without an id."""
        known: dict[tuple[str | None, str], int] = {}
        found = []
        for side in self.sides:
            columns, texts = side.listing.state.rows.columns, side.listing.state.rows.texts
            task, source = columns["task"][side.rows].astype(np.int64), columns["source"][side.rows].astype(np.int64)
            size = len(texts["task"].values)
            pairs, places = np.unique((source if self.by_source else 0) * size + task, return_inverse=True)
            numbers = []
            for pair in pairs.tolist():
                name = texts["task"].values[pair % size]
                key = (texts["source"].values[pair // size], name or "")
                numbers.append(-1 if name is None else known.setdefault(key, len(known)))
            found.append(np.array(numbers, np.int64)[places])
        self.names = list(known)
        return found

    def _rewarded(self, at: int) -> Array:
        side = self.sides[at]
        return self._kept[at] & np.isfinite(side.listing.rewards[side.rows])

    def _count(self, at: int, which: Array) -> Array:
        return np.bincount(self._tasks[at][which], minlength=len(self.names))

    def _sum(self, at: int, measure: str) -> tuple[Array, Array]:
        """The sum of a measure over the attempts at each task, and the number of these attempts."""
        side = self.sides[at]
        values = self._values(at, measure)[side.rows].astype(np.float64)
        having = self._rewarded(at) & np.isfinite(values)
        tasks = self._tasks[at][having]
        sums: Array = np.bincount(tasks, values[having], len(self.names))
        return sums, np.bincount(tasks, minlength=len(self.names))

    def _values(self, at: int, measure: str) -> Array:
        """A measure of all rollouts of a side's run."""
        listing = self.sides[at].listing
        columns = listing.state.rows.columns
        if measure.startswith(_TERM):
            return listing.terms.column(measure.removeprefix(_TERM))
        known: dict[str, Callable[[], Array]] = {
            "reward": lambda: listing.rewards,
            "solved": lambda: np.where(np.isfinite(listing.rewards), listing.rewards >= self.solved_at, np.nan),
            "turns": lambda: columns["turns"],
            "tokens": lambda: columns["sampled_tokens"],
        }
        return known[measure]()

    def means(self, measure: str) -> tuple[Array, Array]:
        """The mean of a measure over the attempts at each task, of both sides; NaN for a task without any."""
        a, b = (divided(*self._sum(at, measure)) for at in (0, 1))
        return a, b

    @cached_property
    def measures(self) -> dict[str, dict[str, Any]]:
        """The measures that can be compared, each with its test."""
        terms = dict.fromkeys(name for side in self.sides for name in side.listing.terms.names)
        names = ["reward", "solved", *(f"{_TERM}{name}" for name in terms), "turns", "tokens"]
        if not any(side.listing.state.rows.columns["sampled_tokens"][side.rows].any() for side in self.sides):
            names.remove("tokens")  # replies of text only have none
        found = {}
        for name in names:
            a, b = self.means(name)
            both = np.isfinite(a) & np.isfinite(b)
            test = paired_test(a[both], b[both])
            found[name] = {"measure": name, **to_plain(test), "statement": test.statement(_words(name))}
        return found

    def answer(self, query: Query) -> dict[str, Any]:
        """The totals, and a page of the requested tasks."""
        measure = query.get("measure") or "reward"
        if measure not in self.measures:
            raise NoAnswer(f"measure is {measure[:60]!r}; give one of {', '.join(self.measures)}")
        a, b = self.means(measure)
        masks = self._which(b - a)
        chosen = self._sorted(self._matching(query, masks), query.get("sort") or "-change", a, b)
        return {
            **{side.letter: side.about() for side in self.sides},
            "solved_at": self.solved_at,
            "measure": measure,
            "method": METHOD,
            "result": self.measures[measure],
            "measures": list(self.measures.values()),
            "tasks": len(self.names),
            **{name: int(mask.sum()) for name, mask in masks.items()},
            "unnamed": [int((~kept).sum()) for kept in self._kept],  # rollouts of tasks without an id
            "on_both": self._on_both(),
            "matched": len(chosen),
            "rows": [self._row(one, a, b) for one in chosen[parse_page(query)].tolist()],
        }

    def _which(self, differences: Array) -> dict[str, Array]:
        known, same = np.isfinite(differences), is_same(differences)
        in_a, in_b = (rollouts > 0 for rollouts in self.rollouts)
        masks = (
            known & ~same & (differences > 0),
            known & ~same & (differences < 0),
            known & same,
            in_a & ~in_b,
            in_b & ~in_a,
            in_a & in_b & ~known,
        )
        return dict(zip(_WHICH, masks, strict=True))

    def _on_both(self) -> int:
        """The number of rollouts that are on both sides, which make the sides look more alike than they are."""
        one, other = self.sides
        if one.listing is not other.listing:
            return 0
        in_one = np.zeros(len(one.listing.state.rows), bool)
        in_one[one.rows] = True
        return int(in_one[other.rows].sum())

    def _matching(self, query: Query, masks: dict[str, Array]) -> Array:
        keep = np.ones(len(self.names), bool)
        if which := query.get("which"):
            if which not in masks:
                raise NoAnswer(f"which is {which[:40]!r}; give one of {', '.join(masks)}")
            keep &= masks[which]
        if part := query.get("name", "").casefold():
            keep &= np.array([part in name.casefold() for _, name in self.names], bool)
        return np.flatnonzero(keep)

    def _sorted(self, chosen: Array, sort: str, a: Array, b: Array) -> Array:
        """Tasks in the requested order; those without a value come last, equals with more attempts first."""
        attempts = self.attempts[0] + self.attempts[1]
        keys: dict[str, Callable[[], Array]] = {
            "task": lambda: _ranks([name for _, name in self.names]),
            "environment": lambda: _ranks([self._environment(one) or "" for one in range(len(self.names))]),
            "change": lambda: np.abs(b - a),
            "difference": lambda: b - a,
            "a": lambda: a,
            "b": lambda: b,
            "solved_a": lambda: divided(self.solved[0], self.attempts[0]),
            "solved_b": lambda: divided(self.solved[1], self.attempts[1]),
            "attempts": lambda: attempts,
        }
        name, down = parse_sort(sort, keys)
        values = keys[name]()[chosen].astype(np.float64)
        return chosen[np.lexsort((-attempts[chosen], -values if down else values))]

    @cached_property
    def _by_task(self) -> list[tuple[Array, Array]]:
        """For each side, its rows in the order of their tasks, and where each task begins."""
        found = []
        for side, tasks in zip(self.sides, self._tasks, strict=True):
            order = np.argsort(tasks, kind="stable")
            found.append((side.rows[order], np.searchsorted(tasks[order], np.arange(len(self.names) + 1))))
        return found

    def _rows_at(self, at: int, task: int) -> Array:
        rows, starts = self._by_task[at]
        return rows[starts[task] : starts[task + 1]]

    def _environment(self, task: int) -> str | None:
        for at in (0, 1):
            for row in self._rows_at(at, task)[:1].tolist():
                return self.sides[at].listing.state.rows.text(row, "environment")
        return None

    def _row(self, task: int, a: Array, b: Array) -> dict[str, Any]:
        source, name = self.names[task]
        return {
            "source": source if self.by_source else None,
            "task": name,
            "environment": self._environment(task),
            "a": self._on_side(0, task, float(a[task])),
            "b": self._on_side(1, task, float(b[task])),
            "difference": number_or_none(b[task] - a[task]),
        }

    def _on_side(self, at: int, task: int, mean: float) -> dict[str, Any] | None:
        """One side's figures of a task, or None without rollouts."""
        rows = self._rows_at(at, task)
        if not len(rows):
            return None
        listing = self.sides[at].listing
        steps = listing.state.rows.columns["step"][rows]
        typical = self._typical(at, rows)
        return {
            "rollouts": len(rows),
            "attempts": int(self.attempts[at][task]),
            "solved": int(self.solved[at][task]),
            "mean": number_or_none(mean),
            "first_step": int(steps.min()),
            "last_step": int(steps.max()),
            "rollout": listing.state.rows.ids[typical],
            "try": listing.state.rows.get("try_index", typical),
        }

    def _typical(self, at: int, rows: Array) -> int:
        """The rollout whose reward is nearest to the mean of its task; of several the latest."""
        listing = self.sides[at].listing
        rewards, columns = listing.rewards[rows], listing.state.rows.columns
        finite = np.isfinite(rewards)
        mean = rewards[finite].mean() if finite.any() else 0.0
        off = np.where(finite, np.abs(rewards - mean), np.inf)
        return int(rows[np.lexsort((columns["attempt"][rows], -columns["step"][rows], off))[0]])


class Comparisons:
    """Compares sides of runs. Sorting or filtering the same comparison again costs little."""

    def __init__(self) -> None:
        self._held: dict[object, TaskComparison] = {}

    def answer(self, query: Query, runs: Mapping[str, RunAnswers]) -> dict[str, Any]:
        """The comparison for a query; tasks are paired by source and id, or with `by=task` only by id."""
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
    """Compare two runs by location, as they are now. Yields a function that answers queries added to this one."""
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


def _words(measure: str) -> str:
    known = {"reward": "mean reward", "solved": "share of solved attempts", "turns": "number of turns"}
    known["tokens"] = "number of sampled tokens"
    return known.get(measure) or f"reward term {measure.removeprefix(_TERM)}"


def _ranks(texts: list[str]) -> Array:
    return np.unique(np.array(texts, "U"), return_inverse=True)[1]
