"""Why the mean reward of one step differs from that of another: by task, environment, stop reason, length, and term.

Each way of sorting rollouts into kinds splits the change into parts that add up to it. With the share w and the mean
reward m of a kind at both steps, and M midway between the two mean rewards, a kind's part is

    (w₀ + w₁)/2 · (m₁ - m₀)          its rollouts have other rewards
    (w₁ - w₀) · ((m₀ + m₁)/2 - M)    there are more or fewer of them

If one step lacks a kind, the mean of the other step is used for both.

Standard errors are clustered by task, since attempts at a task resemble each other.
"""

from typing import Any, NamedTuple

import numpy as np

from rolltape.errors import NoAnswer
from rolltape.view.answers import number_or_none, parse_number
from rolltape.view.run.listing import Listing, Query
from rolltape.view.run.rows import Array

_MOST_KINDS = 8
_TEXT_KINDS = ("environment", "source", "agent", "model", "stop_reason")
_LENGTH_KINDS = 4
_ROUNDING = 1e-12  # error of sums of rewards


class _Sides(NamedTuple):
    """The rewarded rollouts of two steps, each with its side (0: the other step, 1: the step itself)."""

    rows: Array
    side: Array
    rewards: Array
    task: Array  # a number from 0 on for each task


class _Kinds(NamedTuple):
    """A way to sort rollouts into kinds."""

    name: str
    codes: Array  # the kind of each rollout, from 0 on
    described: list[dict[str, Any]]  # by kind: its name, and the filters that select its rollouts
    also: tuple[str, ...] = ()  # other ways with the same kinds


def build_change(listing: Listing, query: Query) -> dict[str, Any]:
    """Compare a step with another, by default with the previous one; the first step with the next one."""
    steps = _rewarded_steps(listing)
    step = _step_in(query, "step", steps)
    if step is None:
        raise NoAnswer("step is missing; give the step that is explained")
    place = int(np.searchsorted(steps, step))
    neighbors = [int(steps[at]) for at in (place - 1, place + 1) if 0 <= at < len(steps)]
    against = _step_in(query, "against", steps)
    if against is None and neighbors:
        against = neighbors[0]
    answer: dict[str, Any] = {"step": step, "against": against, "neighbors": neighbors, "snapshot": listing.snapshot}
    if against is None or against == step:
        return {**answer, "change": None}
    sides = _sides(listing, step, against)
    by = [_parts(sides, kinds) for kinds in _different(_all_kinds(listing, sides))]
    return {
        **answer,
        "change": _difference(sides.rewards, sides.side, sides.task),
        "tasks": _paired(sides),
        "by": [one for one in by if len(one["kinds"]) > 1 or one["name"] == "task"],
        "terms": _terms(listing, sides),
        "measures": _measures(listing, step, against),
    }


def _step_in(query: Query, name: str, steps: Array) -> int | None:
    number = parse_number(query, name)
    if number is None:
        return None
    if number not in steps:
        raise NoAnswer(f"{name} is {query[name][:40]!r}; no rollout of that step has a reward", 404)
    return int(number)


def _rewarded_steps(listing: Listing) -> Array:
    return np.unique(listing.state.rows.columns["step"][np.isfinite(listing.rewards)])


def _sides(listing: Listing, step: int, against: int) -> _Sides:
    steps = listing.state.rows.columns["step"]
    rows = np.flatnonzero(np.isfinite(listing.rewards) & ((steps == step) | (steps == against)))
    task = np.unique(listing.task_keys[rows], return_inverse=True)[1]
    return _Sides(rows, (steps[rows] == step).astype(np.int64), listing.rewards[rows], task)


def _difference(values: Array, side: Array, task: Array) -> dict[str, Any] | None:
    """The means of both sides, and their difference with its standard error; None if a side has no values."""
    counts = np.bincount(side, minlength=2)
    if not counts.all():
        return None
    means = np.bincount(side, values, 2) / counts
    # What each task adds to the difference, minus what it would add if all its values were the mean.
    residuals = (values - means[side]) / counts[side] * np.where(side == 1, 1, -1)
    tasks, places = np.unique(task, return_inverse=True)
    sums = np.bincount(places, residuals)
    error = float(np.sqrt(len(tasks) / (len(tasks) - 1) * (sums**2).sum())) if len(tasks) > 1 else None
    return {
        "means": means.tolist(),
        "counts": counts.tolist(),
        "by": float(means[1] - means[0]),
        "error": error,
        "tasks": len(tasks),
    }


def _parts(sides: _Sides, kinds: _Kinds) -> dict[str, Any]:
    """Each kind's part of the change, the largest first."""
    size = len(kinds.described)
    counts = np.array([np.bincount(kinds.codes[sides.side == one], minlength=size) for one in (0, 1)])
    sums = [np.bincount(kinds.codes[sides.side == one], sides.rewards[sides.side == one], size) for one in (0, 1)]
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.array(sums) / counts
    shares = counts / counts.sum(axis=1, keepdims=True)
    middle = float(np.array(sums).sum(axis=1) @ (1 / counts.sum(axis=1)) / 2)
    both = counts.all(axis=0)
    rewarded = np.where(both, shares.mean(axis=0) * (means[1] - means[0]), 0.0)
    mixed = (shares[1] - shares[0]) * (np.nanmean(np.where(counts > 0, means, np.nan), axis=0) - middle)
    rewarded, mixed, means = (np.where(np.abs(one) < _ROUNDING, 0.0, one) for one in (rewarded, mixed, means))
    parts = rewarded + mixed
    order = np.argsort(-np.abs(parts), kind="stable")
    shown = []
    for kind in order[:_MOST_KINDS].tolist():
        own = kinds.codes == kind
        moved = _difference(sides.rewards[own], sides.side[own], sides.task[own])
        shown.append(
            {
                **kinds.described[kind],
                "counts": counts[:, kind].tolist(),
                "means": [number_or_none(one) for one in means[:, kind].tolist()],
                "part": float(parts[kind]),
                "rewarded": float(rewarded[kind]),
                "mixed": float(mixed[kind]),
                "error": None if moved is None else moved["error"],
            }
        )
    return {
        "name": kinds.name,
        "also": list(kinds.also),
        "kinds": shown,
        "others": max(size - _MOST_KINDS, 0),
        "others_part": float(parts[order[_MOST_KINDS:]].sum()),
        "rewarded": float(rewarded.sum()),
        "mixed": float(mixed.sum()),
    }


def _all_kinds(listing: Listing, sides: _Sides) -> list[_Kinds]:
    rows = listing.state.rows
    found = [_task_kinds(listing, sides)]
    for name in _TEXT_KINDS:
        used, codes = np.unique(rows.columns[name][sides.rows], return_inverse=True)
        texts = [rows.texts[name].values[code] for code in used.tolist()]
        found.append(_Kinds(name, codes, [{"name": text, "filters": {name: text} if text else None} for text in texts]))
    found.append(_length_kinds("length", rows.columns["sampled_tokens"][sides.rows], "tokens"))
    found.append(_length_kinds("turns", rows.columns["turns"][sides.rows], "turns"))
    flags = ("truncated", "tool_errors")
    return [*found, *(_flag_kinds(name, getattr(listing.oddities, name)[sides.rows]) for name in flags)]


def _different(found: list[_Kinds]) -> list[_Kinds]:
    """Remove ways with the same kinds as an earlier way, and add their names to it."""
    kept: list[_Kinds] = []
    for one in found:
        size = len(one.described)
        for at, earlier in enumerate(kept):
            pairs = len(np.unique(earlier.codes * size + one.codes))
            if pairs == size == len(earlier.described) > 1:
                kept[at] = earlier._replace(also=(*earlier.also, one.name))
                break
        else:
            kept.append(one)
    return kept


def _task_kinds(listing: Listing, sides: _Sides) -> _Kinds:
    rows = listing.state.rows
    first = np.unique(sides.task, return_index=True)[1]
    described = []
    for row in sides.rows[first].tolist():
        task, source = rows.text(row, "task"), rows.text(row, "source")
        filters = {"task": task} if task else {"group": rows.text(row, "group")}
        described.append(
            {"name": task or rows.text(row, "group"), "filters": filters | ({"source": source} if source else {})}
        )
    return _Kinds("task", sides.task, described)


def _length_kinds(name: str, values: Array, bound: str) -> _Kinds:
    """Kinds by quarters of an integer over both steps together."""
    edges = np.unique(np.quantile(values, np.linspace(0, 1, _LENGTH_KINDS + 1)[1:-1], method="lower"))
    codes = np.unique(np.searchsorted(edges, values), return_inverse=True)[1]
    described = []
    for kind in range(int(codes.max(initial=-1)) + 1):
        own = values[codes == kind]
        low, high = int(own.min()), int(own.max())
        filters = {f"min_{bound}": str(low), f"max_{bound}": str(high)}
        described.append({"name": [low, high], "filters": filters})
    return _Kinds(name, codes, described)


def _flag_kinds(name: str, values: Array) -> _Kinds:
    """Kinds by a flag: true, false and unknown."""
    flags = np.where(np.isnan(values), 2, np.minimum(np.nan_to_num(values), 1)).astype(np.int64)
    used, codes = np.unique(flags, return_inverse=True)
    filters = (
        [{"max_tool_errors": "0"}, {"min_tool_errors": "1"}] if name == "tool_errors" else [{name: "no"}, {name: "yes"}]
    )
    described = [
        {"name": ("no", "yes", None)[one], "filters": filters[one] if one < 2 else None} for one in used.tolist()
    ]
    return _Kinds(name, codes, described)


def _paired(sides: _Sides) -> dict[str, Any]:
    """The change of the mean rewards of tasks that both steps attempted; each task has the same weight."""
    size = int(sides.task.max()) + 1
    counts = np.array([np.bincount(sides.task[sides.side == one], minlength=size) for one in (0, 1)])
    both = counts.all(axis=0)
    sums = np.array(
        [np.bincount(sides.task[sides.side == one], sides.rewards[sides.side == one], size) for one in (0, 1)]
    )
    moved = sums[1, both] / counts[1, both] - sums[0, both] / counts[0, both]
    shared = len(moved)
    return {
        "shared": shared,
        "only": [int((counts[0] > 0).sum()) - shared, int((counts[1] > 0).sum()) - shared],
        "by": float(moved.mean()) if shared else None,
        "error": float(moved.std(ddof=1) / np.sqrt(shared)) if shared > 1 else None,
        "up": int((moved > 0).sum()),
        "down": int((moved < 0).sum()),
    }


def _terms(listing: Listing, sides: _Sides) -> dict[str, Any]:
    """The changes of the reward terms."""
    rows = []
    for name in listing.terms.names:
        values = listing.terms.column(name)[sides.rows]
        known = np.isfinite(values)
        moved = _difference(values[known], sides.side[known], sides.task[known])
        if moved is not None:
            rows.append({"name": name, **moved})
    return {
        "rows": sorted(rows, key=lambda one: -abs(one["by"])),
        "add_up": listing.terms.add_up(sides.rows),
    }


def _measures(listing: Listing, step: int, against: int) -> list[dict[str, Any]]:
    """Lengths and shares that may explain rewards, over all ended rollouts, rewarded or not."""
    columns, oddities = listing.state.rows.columns, listing.oddities
    ended = columns["ended_ns"] > 0
    rows = np.flatnonzero(ended & ((columns["step"] == step) | (columns["step"] == against)))
    side = (columns["step"][rows] == step).astype(np.int64)
    task = listing.task_keys[rows]
    named: dict[str, Array] = {
        "sampled_tokens": columns["sampled_tokens"].astype(np.float64),
        "turns": columns["turns"].astype(np.float64),
        "truncated": oddities.truncated,
        "tool_errors": np.minimum(oddities.tool_errors, 1),
        "unrewarded": (~listing.has_reward).astype(np.float64),
    }
    found = []
    for name, values in named.items():
        known = np.isfinite(values[rows])
        moved = _difference(values[rows][known], side[known], task[known])
        if moved is not None:
            found.append({"name": name, **moved})
    return found
