"""The overview of a run: figures over all of its rollouts, by step and by time."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from rolltape.tape.index.database import CAUSES, FATES
from rolltape.view.answers import to_plain
from rolltape.view.run.listing import Listing
from rolltape.view.run.rows import STATUSES, Array
from rolltape.view.run.state import RunState

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
_TIME_BUCKETS = 60
_PROBLEMS_LISTED = 50
_LENGTH_QUANTILES = (0.1, 0.5, 0.9)
_BINS = 30
# If the largest value is so many times the median, and so much above the least, bins of equal width are useless.
_LONG_TAIL, _WIDE = 8.0, 40


def build_overview(listing: Listing, step: int | None = None) -> dict[str, Any]:
    """The figures of a run, or of one of its steps."""
    state = listing.state
    columns = state.rows.columns
    rows = np.arange(len(state.rows)) if step is None else np.flatnonzero(columns["step"] == step)
    ledgers, behind = listing.ledgers, _behind(listing)
    rows = rows[np.argsort(columns["step"][rows], kind="stable")]
    steps, first = np.unique(columns["step"][rows], return_index=True)
    by_number = dict(zip(steps.tolist(), np.split(rows, first[1:]), strict=bool(len(rows))))
    # A trainer may count its steps in another way than the recording program.
    by_number = {one: rows[:0] for one in state.trainer if step in (None, one)} | by_number
    by_step = [_step(listing, one, own, ledgers, behind) for one, own in sorted(by_number.items())]
    rewards = _finite(listing.rewards[rows])
    return {
        "tasks": _tasks(columns["task"][rows], columns["group"][rows]),
        "last_activity_ns": state.last_activity_ns or None,
        **_problems(state),
        "rollouts": len(rows),
        "pending": state.pending(rows),
        "read_through": state.read_through,
        "progress": listing.progress,
        "turns": int(columns["turns"][rows].sum()),
        "sampled_tokens": int(columns["sampled_tokens"][rows].sum()),
        "reward": describe_rewards(rewards),
        "rewards_not_finite": int(listing.has_reward[rows].sum()) - len(rewards),
        "by_step": by_step,
        "by_time": _by_time(listing, rows),
        "reward_histogram": build_histogram(rewards),
        "turns_histogram": build_histogram(columns["turns"][rows], long_tailed=True),
        "tokens_histogram": build_histogram(columns["sampled_tokens"][rows], long_tailed=True),
        "statuses": count_statuses(listing, rows),
        "ledger": _summed([fate.value for fate in FATES], ledgers[rows]),
        "fork_causes": _summed([cause.value for cause in CAUSES], listing.causes[rows]),
        "fork_cause_rollouts": _summed([cause.value for cause in CAUSES], listing.causes[rows] > 0),
        "staleness": _tally(behind[rows]),
        "versions": list(listing.versions),
        **{name: _texts(listing, column, rows) for name, column in _TEXT_COUNTS.items()},
        "tags": _tags(listing, rows),
        "notes": int(listing.state.rows.columns["notes"][rows].sum()),
        "presets": listing.oddities.presets(rows),
        "snapshot": state.snapshot,
    }


_TEXT_COUNTS = {"stop_reasons": "stop_reason", "environments": "environment", "agents": "agent", "models": "model"}


def build_headline(listing: Listing) -> dict[str, Any]:
    """A run as a row of the list of runs."""
    state, columns = listing.state, listing.state.rows.columns
    rewards = _finite(listing.rewards)
    return {
        "live": state.live,
        "progress": listing.progress,
        "pending": state.pending(),
        "steps": len(np.unique(columns["step"])),
        "tasks": _tasks(columns["task"], columns["group"]),
        "rollouts": len(state.rows),
        "statuses": count_statuses(listing, slice(None)),
        "mean_reward": float(rewards.mean()) if len(rewards) else None,
        "sampled_tokens": int(columns["sampled_tokens"].sum()),
        "last_activity_ns": state.last_activity_ns or None,
        **_problems(state),
    }


def _problems(state: RunState) -> dict[str, Any]:
    problems = state.problems
    return {"problems": len(problems), "problem_list": problems[:_PROBLEMS_LISTED]}


def _step(listing: Listing, step: int, rows: Array, ledgers: Array, behind: Array) -> dict[str, Any]:
    trainer = listing.state.trainer.get(step)
    return {
        "step": step,
        "rollouts": len(rows),
        "reward": describe_rewards(listing.rewards[rows]),
        "lengths": describe_lengths(listing, rows),
        "ledger": _summed([fate.value for fate in FATES], ledgers[rows]),
        "fork_causes": _summed([cause.value for cause in CAUSES], listing.causes[rows]),
        "staleness": _tally(behind[rows]),
        "trainer": None
        if trainer is None
        else {**trainer.figures, "max_mismatch_at": to_plain(trainer.max_mismatch_at)},
    }


def describe_rewards(rewards: Array) -> dict[str, Any] | None:
    """How the finite ones among rewards are distributed, and how many there are; None: there are none."""
    rewards = _finite(rewards)
    if not len(rewards):
        return None
    return {
        "rollouts": len(rewards),
        "mean": float(rewards.mean()),
        "std": float(rewards.std()),
        "min": float(rewards.min()),
        "max": float(rewards.max()),
        "quantiles": np.quantile(rewards, QUANTILES).tolist(),
    }


def describe_lengths(listing: Listing, rows: Array) -> dict[str, Any]:
    """The figures of these rollouts. A share consists of a count, and the number of rollouts for which it is known."""
    columns, oddities = listing.state.rows.columns, listing.oddities
    ended = rows[columns["ended_ns"][rows] > 0]
    truncated = oddities.truncated[ended]
    results, errors = oddities.tool_results[ended], oddities.tool_errors[ended]
    return {
        "turns": _quantiles(columns["turns"][ended]),
        "tokens": _quantiles(columns["sampled_tokens"][ended]),
        "truncated": _share(truncated == 1, np.isfinite(truncated)),
        "tool_errors": [int(np.nansum(errors)), int(np.nansum(results))],
        "with_tool_errors": _share(errors > 0, np.isfinite(errors)),
        "statuses": count_statuses(listing, rows),
        "stop_reasons": count_texts(listing, "stop_reason", rows),
    }


@np.errstate(over="ignore", invalid="ignore")
def build_histogram(values: Array, *, long_tailed: bool = False) -> dict[str, Any]:
    """Counts in bins of equal width, or with `long_tailed` of equal ratio if a few values are far larger than most.

    Use `long_tailed` only for counts; the value 0 has its own bin then.
    """
    if not len(values):
        return {"edges": [], "counts": [], "log": False, "quantiles": []}
    values = values.astype(np.float64)
    low, high = float(values.min()), float(values.max())
    bins: Any = 1
    if low < high:
        bins = np.linspace(low, high, _BINS + 1)
        # Rewards may differ only by rounding, or by more than a float can hold: then no edges are between them.
        bins = bins if (np.diff(bins) > 0).all() else np.array([low, high])
    is_tail = high >= _LONG_TAIL * max(float(np.median(values)), 1.0) and high - low >= _WIDE
    is_log = long_tailed and low >= 0 and is_tail
    if is_log:
        least = float(values[values > 0].min())
        whole = np.unique(np.floor(np.geomspace(least, high, _BINS + 1)))  # of counts: an edge is a count
        bins = np.append(whole[:-1], max(high, whole[-1]))
        bins = np.insert(bins, 0, 0.0) if low == 0 else bins
    counts, edges = np.histogram(values, bins=bins)
    quantiles = np.quantile(values, (0.5, 0.9, 0.99)).tolist()
    return {"edges": edges.tolist(), "counts": counts.tolist(), "log": is_log, "quantiles": quantiles}


def count_statuses(listing: Listing, rows: Array | slice) -> dict[str, int]:
    """How many of these rollouts have each status."""
    return _counts([status.value for status in STATUSES], listing.statuses[rows])


def count_texts(listing: Listing, column: str, rows: Array) -> dict[str, int]:
    """How many of these rollouts have each text of a column."""
    return _counts(listing.state.rows.texts[column].values, listing.state.rows.columns[column][rows])


def _quantiles(values: Array) -> list[float]:
    """The mean, then quantiles; empty without values."""
    return [float(values.mean()), *np.quantile(values, _LENGTH_QUANTILES).tolist()] if len(values) else []


def _share(having: Array, known: Array) -> list[int]:
    return [int(having.sum()), int(known.sum())]


def _counts(names: Any, codes: Array) -> dict[str, int]:
    counts = np.bincount(codes.astype(np.int64), minlength=len(names)).tolist()
    return {name: count for name, count in zip(names, counts, strict=True) if count and name is not None}


def _by_time(listing: Listing, rows: Array) -> list[dict[str, Any]]:
    """Rewards by the rollouts' end times, in intervals of equal length."""
    ended = listing.state.rows.columns["ended_ns"][rows]
    known = (ended > 0) & np.isfinite(listing.rewards[rows])
    if not known.any():
        return []
    ended, rewards = ended[known], listing.rewards[rows][known]
    first, last = int(ended.min()), int(ended.max())
    width = max((last - first) // _TIME_BUCKETS + 1, 1)
    bucket = (ended - first) // width
    order = np.argsort(bucket, kind="stable")
    buckets, starts = np.unique(bucket[order], return_index=True)
    return [
        {"at_ns": first + one * width, "reward": describe_rewards(own)}
        for one, own in zip(buckets.tolist(), np.split(rewards[order], starts[1:]), strict=True)
    ]


def _behind(listing: Listing) -> Array:
    """How many versions each rollout's oldest weights are behind the newest that its step used; -1 if unknown."""
    state, columns = listing.state, listing.state.rows.columns
    order = {version: index for index, version in enumerate(listing.versions)}
    lists = state.rows.lists("versions")
    oldest = np.array([min((order[one] for one in versions or ()), default=-1) for versions in lists], np.int64)
    newest = np.array([max((order[one] for one in versions or ()), default=-1) for versions in lists], np.int64)
    if not len(state.rows):
        return np.empty(0, np.int64)
    # There are few different pairs of a step and its versions.
    pairs, place = np.unique(columns["step"] * len(lists) + columns["versions"], return_inverse=True)
    steps, codes = np.divmod(pairs, len(lists))
    newest_by_number: dict[int, int] = {}
    for step, seen in zip(steps.tolist(), newest[codes].tolist(), strict=True):
        newest_by_number[step] = max(seen, newest_by_number.get(step, -1))
    limits = np.array([newest_by_number[step] for step in steps.tolist()])
    return np.where(oldest[codes] < 0, -1, limits - oldest[codes])[place]


def _tally(behind: Array) -> dict[str, int]:
    values, counts = np.unique(behind[behind >= 0], return_counts=True)
    return {str(value): int(count) for value, count in zip(values.tolist(), counts.tolist(), strict=True)}


def _summed(names: Sequence[str], numbers: Array) -> dict[str, int]:
    sums = numbers.sum(axis=0).tolist()
    return {name: total for name, total in zip(names, sums, strict=True) if total}


def _texts(listing: Listing, column: str, rows: Array) -> dict[str, int]:
    return dict(Counter(count_texts(listing, column, rows)).most_common())


def _tags(listing: Listing, rows: Array) -> dict[str, int]:
    """How many rollouts have each tag, of their own or of a turn or token."""
    columns, both = listing.state.rows.columns, [listing.state.rows.lists(name) for name in ("tags", "inner_tags")]
    codes = columns["tags"][rows].astype(np.int64) * len(both[1]) + columns["inner_tags"][rows]
    found: Counter[str] = Counter()
    for code, count in zip(*(one.tolist() for one in np.unique(codes, return_counts=True)), strict=True):
        own, inner = (lists[at] or () for lists, at in zip(both, divmod(code, len(both[1])), strict=True))
        found.update(dict.fromkeys((*own, *inner), count))
    return dict(found.most_common())


def _tasks(tasks: Array, groups: Array) -> int:
    """The number of tasks, or of groups if tasks have no ids."""
    return int(np.count_nonzero(np.bincount(tasks[tasks != 0])) or np.count_nonzero(np.bincount(groups)))


def _finite(rewards: Array) -> Array:
    return rewards[np.isfinite(rewards)]
