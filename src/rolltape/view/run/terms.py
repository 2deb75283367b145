"""`RewardTerms`: the terms of the rewards of rollouts, a column for each term."""

from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from rolltape.view.run.rows import Array

if TYPE_CHECKING:
    from rolltape.view.run.listing import Listing

_SUM_OFF = 1e-6  # tolerance for terms that add up to the reward


class RewardTerms:
    """The terms of all rewards of one listing."""

    def __init__(self, listing: "Listing") -> None:
        self._listing = listing
        self._codes = np.where(listing.has_reward, listing.state.rows.columns["terms"], 0)
        self._decoded = listing.state.rows.decoded_terms()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of terms; the most frequent come first, equals by name."""
        used = np.bincount(self._codes, minlength=len(self._decoded)).tolist()
        counts: Counter[str] = Counter()
        for terms, count in zip(self._decoded, used, strict=True):
            if count:
                counts.update(dict.fromkeys(terms, count))
        return tuple(sorted(counts, key=lambda name: (-counts[name], name)))

    def column(self, name: str) -> Array:
        """A term of every rollout; NaN without it."""
        nan = float("nan")
        values: Array = np.fromiter((terms.get(name, nan) for terms in self._decoded), np.float64, len(self._decoded))
        return np.asarray(values[self._codes])

    def of(self, row: int) -> dict[str, float]:
        """The terms of one rollout's reward."""
        return self._decoded[int(self._codes[row])]

    def add_up(self, rows: Array) -> bool:
        """Whether the terms of each of these rewards add up to the reward."""
        if not len(rows) or not self.names:
            return False
        total = sum(np.nan_to_num(self.column(name)[rows]) for name in self.names)
        return bool((np.abs(total - self._listing.rewards[rows]) <= _SUM_OFF).all())
