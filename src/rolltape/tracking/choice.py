"""Chooses which few rollouts of a step are shown. The choice does not depend on the order in which they ended."""

import enum
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from rolltape.errors import SinkError
from rolltape.records.ids import digest_of
from rolltape.records.jsonable import shown as shown_in_errors
from rolltape.tracking.summary import ShownStep


class Choice(enum.StrEnum):
    """How rollouts are chosen."""

    FIRST = "first"  # the first in the list
    UNIFORM = "uniform"  # by a hash of their ids, each with the same chance
    REWARDS = "rewards"  # evenly spaced from the lowest reward to the highest; then those without one


class Candidate(NamedTuple):
    """A rollout that may be shown."""

    id: str
    reward: float | None


# Given a split, a step and its candidates, returns the positions of those to show.
Pick = Callable[[str, int, Sequence[Candidate]], list[int]]


def chosen(candidates: Sequence[Candidate], limit: int, choice: Choice | str = Choice.FIRST) -> list[int]:
    """The positions of at most `limit` candidates, in ascending order. Empty if `limit` is 0 or less."""
    everyone = list(range(len(candidates)))
    how = Choice(choice)
    if limit <= 0 or len(candidates) <= limit or how is Choice.FIRST:
        return everyone[: max(limit, 0)]
    if how is Choice.UNIFORM:
        return sorted(sorted(everyone, key=lambda at: _hash(candidates[at]))[:limit])
    return sorted(_over_rewards(candidates, limit))


class Allowance:
    """Limits the traces of a split and step to `limit` over all calls, and chooses which are shown."""

    def __init__(self, limit: int, choice: Choice | str = Choice.FIRST) -> None:
        if choice not in list(Choice):
            raise SinkError(f"choice is {shown_in_errors(choice)}; give one of {', '.join(Choice)}")
        self._limit = limit
        self._choice = Choice(choice)
        self._picked: Counter[tuple[str, int]] = Counter()

    def pick(self, split: str, step: int, candidates: Sequence[Candidate]) -> list[int]:
        """Choose which candidates are shown, by position, and count them as shown."""
        positions = chosen(candidates, self._limit - self._picked[split, step], self._choice)
        self._picked[split, step] += len(positions)
        return positions

    def limited(self, shown: ShownStep) -> ShownStep:
        """The step with as many of its traces as are allowed."""
        candidates = [Candidate(f"{one.rollout}.{one.try_index}", one.total_reward) for one in shown.traces]
        kept = tuple(shown.traces[position] for position in self.pick(shown.split, shown.step, candidates))
        return msgspec.structs.replace(shown, traces=kept)


def _over_rewards(candidates: Sequence[Candidate], limit: int) -> list[int]:
    ranked = sorted(
        (one.reward, _hash(one), at)
        for at, one in enumerate(candidates)
        if one.reward is not None and not math.isnan(one.reward)
    )
    without = sorted(set(range(len(candidates))) - {at for *_, at in ranked})
    if len(ranked) <= limit:
        return ([at for *_, at in ranked] + without)[:limit]
    if limit == 1:
        return [ranked[(len(ranked) - 1) // 2][2]]
    # Evenly spaced ranks, both ends included, rounded in whole numbers so that no two meet.
    gaps = limit - 1
    return [ranked[(2 * step * (len(ranked) - 1) + gaps) // (2 * gaps)][2] for step in range(limit)]


def _hash(candidate: Candidate) -> bytes:
    return digest_of("shown", candidate.id)
