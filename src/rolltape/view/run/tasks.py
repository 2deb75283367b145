"""The table of a run's tasks: how often each was solved, and how that changed over steps."""

from collections.abc import Callable
from typing import Any

import numpy as np

from rolltape.errors import NoAnswer
from rolltape.view.answers import number_or_none, parse_number, parse_page, parse_sort, parse_step
from rolltape.view.run.listing import Listing, Query
from rolltape.view.run.rows import Array

_SORTS = ("task", "environment", "attempts", "solved", "mean", "best", "spread", "change", "turns", "tokens", "step")


class TaskTable:
    """The tasks of a run, or of one of its steps. A task without an id is identified by its group.

    Two sources may have tasks with the same name.
    """

    def __init__(self, listing: Listing, step: int | None = None, solved_at: float | None = None) -> None:
        self._listing = listing
        columns = listing.state.rows.columns
        rewarded = np.isfinite(listing.rewards)
        self.solved_at = solved_limit(listing.rewards[rewarded]) if solved_at is None else solved_at
        rows = np.arange(len(listing.state.rows)) if step is None else np.flatnonzero(columns["step"] == step)
        # Sorted by task, then by step, so that sums over a task or a step are sums over a range of rows.
        keys = listing.task_keys[rows]
        order = np.lexsort((columns["step"][rows], keys))
        self._rows, keys = rows[order], keys[order]
        self._has_reward = rewarded[self._rows]
        self._rewards = np.where(self._has_reward, listing.rewards[self._rows], 0.0)
        self._is_solved = self._has_reward & (self._rewards >= self.solved_at)
        self._first = _starts(keys)
        self._steps = columns["step"][self._rows]
        self.attempts = self._sum(self._has_reward)
        self.solved = self._sum(self._is_solved)
        self.mean = divided(self._sum(self._rewards), self.attempts)
        self._groups = self._by_step(keys)

    def answer(self, query: Query) -> dict[str, Any]:
        """The totals, the totals by step, and a page of the requested tasks."""
        chosen = self._sorted(self._matching(query), query.get("sort") or "mean")
        attempts = self._groups["attempts"]
        k = int(np.bincount(attempts[attempts > 0]).argmax()) if (attempts > 0).any() else 1  # the most common size
        steps = np.unique(self._groups["step"])
        return {
            "solved_at": self.solved_at,
            "k": k,
            "tasks": len(self._first),
            **_counts(self.attempts, self.solved),
            **self._passes(np.ones(len(attempts), bool), k),
            "by_step": [self._step(one, k) for one in steps.tolist()],
            "matched": len(chosen),
            "rows": [self._row(one) for one in chosen[parse_page(query)].tolist()],
            "snapshot": self._listing.snapshot,
            "progress": self._listing.progress,
        }

    def _sum(self, values: Array) -> Array:
        return _summed(values, self._first)

    def _by_step(self, keys: Array) -> dict[str, Array]:
        """Attempts, successes and summed rewards of each task at each of its steps."""
        starts = _starts(keys, self._steps)
        attempts = _summed(self._has_reward, starts)
        return {
            "task": np.searchsorted(self._first, starts, "right") - 1,
            "step": self._steps[starts],
            "attempts": attempts,
            "solved": _summed(self._is_solved, starts),
            "mean": divided(_summed(self._rewards, starts), attempts),
        }

    def _step(self, step: int, k: int) -> dict[str, Any]:
        at = self._groups["step"] == step
        attempts, solved = self._groups["attempts"][at], self._groups["solved"][at]
        return {"step": step, "tasks": int(at.sum()), **_counts(attempts, solved), **self._passes(at, k)}

    def _passes(self, at: Array, k: int) -> dict[str, Any]:
        attempts, solved = self._groups["attempts"][at], self._groups["solved"][at]
        return {"pass_1": _pass_at(1, attempts, solved), "pass_k": _pass_at(k, attempts, solved)}

    def _matching(self, query: Query) -> Array:
        keep = np.ones(len(self._first), bool)
        if which := query.get("solved_by"):
            masks = _solved_by(self.attempts, self.solved)
            if which not in masks:
                raise NoAnswer(f"solved_by is {which[:40]!r}; give one of {', '.join(masks)}")
            keep &= masks[which]
        if part := query.get("name", "").casefold():
            keep &= np.array([part in (self._name(one) or "").casefold() for one in range(len(self._first))], bool)
        return np.flatnonzero(keep)

    def _sorted(self, chosen: Array, sort: str) -> Array:
        """Tasks in the requested order; those without a value come last, equals with more attempts first."""
        name, down = parse_sort(sort, _SORTS)
        keys = self._keys(name)[chosen].astype(np.float64)
        return chosen[np.lexsort((-self.attempts[chosen], -keys if down else keys))]

    def _keys(self, name: str) -> Array:
        columns, rows = self._listing.state.rows.columns, self._rows
        last = np.append(self._first[1:], len(rows)) - 1
        sizes = last - self._first + 1
        if name in ("task", "environment"):
            texts = [self._text(name, one) or "" for one in range(len(self._first))]
            return np.unique(np.array(texts, "U"), return_inverse=True)[1]
        keys: dict[str, Callable[[], Array]] = {
            "attempts": lambda: self.attempts,
            "solved": lambda: divided(self.solved, self.attempts),
            "mean": lambda: self.mean,
            "best": self._best,
            "spread": self._spread,
            "change": self._change,
            "turns": lambda: divided(self._sum(columns["turns"][rows]), sizes),
            "tokens": lambda: divided(self._sum(columns["sampled_tokens"][rows]), sizes),
            "step": lambda: self._steps[last],
        }
        return keys[name]()

    def _best(self) -> Array:
        if not len(self._first):
            return np.zeros(0)
        best = np.maximum.reduceat(np.where(self._has_reward, self._rewards, -np.inf), self._first)
        return np.where(self.attempts > 0, best, np.nan)

    def _spread(self) -> Array:
        sizes = np.diff(self._first, append=len(self._rows))
        deviations = np.where(self._has_reward, self._rewards - np.repeat(self.mean, sizes), 0)
        return np.asarray(np.sqrt(divided(self._sum(deviations**2), self.attempts)))

    def _change(self) -> Array:
        """The mean reward of a task's last rewarded step minus that of its first; NaN if it has only one."""
        change = np.full(len(self._first), np.nan)
        known = np.flatnonzero(self._groups["attempts"] > 0)
        task, mean = self._groups["task"][known], self._groups["mean"][known]
        starts = _starts(task)
        ends = np.append(starts[1:], len(task)) - 1
        several = ends > starts[: len(ends)] if len(starts) else np.zeros(0, bool)
        change[task[starts[several]]] = mean[ends[several]] - mean[starts[several]]
        return change

    def _text(self, name: str, task: int) -> str | None:
        return self._listing.state.rows.text(int(self._rows[self._first[task]]), name)

    def _name(self, task: int) -> str | None:
        return self._text("task", task) or self._text("group", task)

    def _row(self, task: int) -> dict[str, Any]:
        first = int(self._first[task])
        end = int(self._first[task + 1]) if task + 1 < len(self._first) else len(self._rows)
        columns, rows = self._listing.state.rows.columns, self._rows[first:end]
        groups = np.unique(columns["group"][rows])
        rewards = self._rewards[first:end][self._has_reward[first:end]]
        return {
            "task": self._text("task", task),
            "source": self._text("source", task),
            "group": self._text("group", task) if len(groups) == 1 else None,  # None if it has several
            "environment": self._text("environment", task),
            "rollouts": len(rows),
            "attempts": int(self.attempts[task]),
            "solved": int(self.solved[task]),
            "mean": number_or_none(self.mean[task]),
            "best": float(rewards.max()) if len(rewards) else None,
            "spread": float(rewards.std()) if len(rewards) else None,
            "first_step": int(self._steps[first]),
            "last_step": int(self._steps[end - 1]),
            "by_step": self._task_steps(task),
            "turns": float(columns["turns"][rows].mean()),
            "tokens": float(columns["sampled_tokens"][rows].mean()),
        }

    def _task_steps(self, task: int) -> list[list[float]]:
        """The steps at which a task was rewarded, each with its mean reward."""
        low, high = np.searchsorted(self._groups["task"], [task, task + 1])
        steps, means = self._groups["step"][low:high].tolist(), self._groups["mean"][low:high].tolist()
        return [[step, mean] for step, mean in zip(steps, means, strict=True) if mean == mean]


def build_tasks(listing: Listing, query: Query) -> dict[str, Any]:
    return TaskTable(listing, parse_step(query), parse_number(query, "solved_at")).answer(query)


def solved_limit(rewards: Array) -> float:
    """The least reward at which a task counts as solved: 1, or the largest reward if that is smaller."""
    return min(1.0, float(rewards.max())) if len(rewards) and rewards.max() > 0 else 1.0


def _pass_at(k: int, attempts: Array, solved: Array) -> float | None:
    """The probability that one of k attempts solves a task, over groups with at least k attempts; None without any."""
    enough = attempts >= k
    left, of = (attempts - solved)[enough].astype(np.float64), attempts[enough].astype(np.float64)
    if not len(of):
        return None
    failing = np.ones(len(of))
    for drawn in range(k):  # drawn without replacement: of n attempts, n - c have failed
        failing *= np.maximum(left - drawn, 0) / (of - drawn)
    return float(1 - failing.mean())


def _solved_by(attempts: Array, solved: Array) -> dict[str, Array]:
    """Which tasks are solved by none, some or all of their attempts, and which have no rewarded attempt."""
    rewarded = attempts > 0
    return {
        "none": rewarded & (solved == 0),
        "some": (solved > 0) & (solved < attempts),
        "all": rewarded & (solved == attempts),
        "unrewarded": ~rewarded,
    }


def _counts(attempts: Array, solved: Array) -> dict[str, int]:
    return {name: int(those.sum()) for name, those in _solved_by(attempts, solved).items()}


def _summed(values: Array, starts: Array) -> Array:
    """The sums of ranges of values."""
    kind = np.float64 if values.dtype.kind == "f" else np.int64
    return np.add.reduceat(values, starts, dtype=kind) if len(starts) else np.zeros(0, kind)


def _starts(*keys: Array) -> Array:
    """Where each range of equal keys begins."""
    if not len(keys[0]):
        return np.zeros(0, np.int64)
    changes = np.zeros(len(keys[0]) - 1, bool)
    for one in keys:
        changes |= one[1:] != one[:-1]
    return np.concatenate([[0], np.flatnonzero(changes) + 1])


def divided(sums: Array, counts: Array) -> Array:
    quotients = np.full(len(sums), np.nan)
    np.divide(sums, counts, out=quotients, where=counts > 0)
    return quotients
