"""The overview of a run: figures over all of its rollouts, by step and by time."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from rolltape.tape.index.database import CAUSES, FATES
from rolltape.view.answers import to_plain
from rolltape.view.run.lengths import build_histogram, count_statuses, count_texts, describe_lengths
from rolltape.view.run.listing import Listing
from rolltape.view.run.rows import Array
from rolltape.view.run.state import RunState

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
_TIME_BUCKETS = 60
_PROBLEMS_LISTED = 50


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
