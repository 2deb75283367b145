"""`Oddities`: columns with possible oddities of rollouts, and presets of filters for finding reward hacking."""

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from rolltape.errors import NoAnswer
from rolltape.records.rollout import Status, StopReason
from rolltape.view.run.rows import BEHAVIOR_CODE, STATUS_CODE, Array

if TYPE_CHECKING:
    from rolltape.view.run.listing import Listing

_CUT_REASONS = (StopReason.MAX_TOKENS, StopReason.CONTEXT_OVERFLOW)
SHORT_SHARE = 0.25  # of the median length: up to this share a rollout counts as very short
_FEWEST_OF_TASK = 4  # rollouts of a task that are enough for a median
_FEWEST_OTHERS = 3  # other rewarded rollouts of a group that are enough for a comparison
_FAR_DEVIATIONS = 3.0
_FAR_SHARE = 0.25  # of the distance between the least and the largest reward of the run

# The filters, and the column values that match each of their values.
_YES_OR_NO: dict[str, tuple[int, ...]] = {"yes": (1,), "no": (0,)}
FLAGS: dict[str, dict[str, tuple[int, ...]]] = {
    **dict.fromkeys(("filtered", "rewarded", "truncated", "short", "edited_tests"), _YES_OR_NO),
    "far": {"yes": (1, -1), "above": (1,), "below": (-1,), "no": (0,)},
}
# The presets and their filters.
PRESETS: dict[str, dict[str, str]] = {
    "rewarded_truncated": {"rewarded": "yes", "truncated": "yes"},
    "rewarded_short": {"rewarded": "yes", "short": "yes"},
    "edited_tests": {"edited_tests": "yes"},
    "far_from_group": {"far": "yes"},
}


class Oddities:
    """Columns over the rows of one listing. NaN means unknown."""

    def __init__(self, listing: "Listing") -> None:
        self._listing = listing
        self._columns = listing.state.rows.columns

    def behavior(self, name: str) -> Array:
        """A count of the rollouts' summaries."""
        values = self._columns["behavior"][:, BEHAVIOR_CODE[name]].astype(np.float64)
        values[values < 0] = np.nan
        return values

    @cached_property
    def filtered(self) -> Array:
        """1 if the rollout is kept out of training."""
        return np.asarray(self._columns["filter"] != 0)

    @cached_property
    def rewarded(self) -> Array:
        """1 if the reward is above 0, else 0."""
        return np.where(self._listing.has_reward, self._listing.rewards > 0, np.nan)

    @cached_property
    def truncated(self) -> Array:
        """1 if a limit on tokens ended the rollout or one of its replies, else 0."""
        reasons = self._listing.state.rows.texts["stop_reason"]
        ended_by = np.isin(self._columns["stop_reason"], [reasons.known(reason.value) for reason in _CUT_REASONS])
        cut = self.behavior("cut_replies")
        return np.where(ended_by, 1.0, np.where(np.isnan(cut), np.nan, cut > 0))

    @cached_property
    def edited_tests(self) -> Array:
        """1 if one of its tool calls changes a test file."""
        edits = self.behavior("test_edits")
        return np.where(np.isnan(edits), np.nan, edits > 0)

    @cached_property
    def short(self) -> Array:
        """1 if its sampled tokens are at most a quarter of its task's median, or of the run's if the task has few."""
        tokens = self._columns["sampled_tokens"].astype(np.float64)
        counted = (self._listing.statuses == STATUS_CODE[Status.FINISHED]) & (tokens > 0)
        if not counted.any():
            return np.full(len(tokens), np.nan)
        medians = np.full(len(tokens), float(np.median(tokens[counted])))
        rows = np.flatnonzero(counted)
        rows = rows[np.lexsort((tokens[rows], self._listing.task_keys[rows]))]  # by task, each sorted by length
        starts = np.flatnonzero(np.diff(self._listing.task_keys[rows], prepend=np.inf))
        sizes = np.diff(np.append(starts, len(rows)))
        middle = (tokens[rows[starts + (sizes - 1) // 2]] + tokens[rows[starts + sizes // 2]]) / 2
        enough = np.repeat(sizes >= _FEWEST_OF_TASK, sizes)
        medians[rows[enough]] = np.repeat(middle, sizes)[enough]
        return np.where(counted, tokens <= SHORT_SHARE * medians, np.nan)

    @cached_property
    def far(self) -> Array:
        """1 if its reward is far above the others of its group, -1 if far below, else 0."""
        rewards = self._listing.rewards
        known = np.isfinite(rewards)
        far = np.where(known, 0.0, np.nan)
        if not known.any():
            return far
        least = _FAR_SHARE * float(np.ptp(rewards[known]))
        group = self._columns["group"][known].astype(np.int64)
        own, middle = rewards[known], float(rewards[known].mean())
        centered = own - middle  # centered, so that sums of squares stay precise
        others = np.bincount(group)[group] - 1.0
        sums = np.bincount(group, centered)[group] - centered
        squares = np.bincount(group, centered**2)[group] - centered**2
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = sums / others
            deviation = np.sqrt(np.maximum(squares / others - mean**2, 0))
            away = centered - mean
            is_far = (others >= _FEWEST_OTHERS) & (np.abs(away) >= _FAR_DEVIATIONS * deviation - 1e-9)
        is_far &= (np.abs(away) >= least) & (away != 0) & (least > 0)
        far[known] = np.where(is_far, np.sign(away), 0.0)
        return far

    @cached_property
    def tool_results(self) -> Array:
        return self.behavior("tool_results")

    @cached_property
    def tool_errors(self) -> Array:
        return self.behavior("tool_errors")

    def mask(self, name: str, value: str) -> Array:
        """The rows that match a filter. Unknown values match none."""
        passing = FLAGS[name].get(value)
        if passing is None:
            raise NoAnswer(f"{name} is {value[:40]!r}; give {' or '.join(FLAGS[name])}")
        return np.isin(getattr(self, name), passing)

    def presets(self, rows: Array) -> list[dict[str, Any]]:
        """Each preset with its filters, and how many of these rows match."""
        counted = []
        for name, filters in PRESETS.items():
            passing = np.logical_and.reduce([self.mask(*one)[rows] for one in filters.items()])
            counted.append({"name": name, "filters": filters, "rollouts": int(passing.sum())})
        return counted
