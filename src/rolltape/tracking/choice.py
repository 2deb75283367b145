"""Choose which few of many rollouts are shown; the choice does not depend on the order in which they ended."""

import enum
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rolltape.records.ids import digest_of


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
    """The positions of at most `limit` candidates, in ascending order; none if it is 0 or less."""
    everyone = list(range(len(candidates)))
    how = Choice(choice)
    if limit <= 0 or len(candidates) <= limit or how is Choice.FIRST:
        return everyone[: max(limit, 0)]
    if how is Choice.UNIFORM:
        return sorted(sorted(everyone, key=lambda at: _hash(candidates[at]))[:limit])
    return sorted(_over_rewards(candidates, limit))


def _over_rewards(candidates: Sequence[Candidate], limit: int) -> list[int]:
    rewards = {at: one.reward for at, one in enumerate(candidates)}
    ranked = sorted(
        (
            (reward, _hash(candidates[at]), at)
            for at, reward in rewards.items()
            if reward is not None and reward == reward
        )
    )
    without = [at for at, reward in rewards.items() if reward is None or math.isnan(reward)]
    if len(ranked) <= limit:
        return ([at for *_, at in ranked] + without)[:limit]
    if limit == 1:
        return [ranked[(len(ranked) - 1) // 2][2]]
    # Evenly spaced ranks, both ends included, rounded in whole numbers so that no two meet.
    gaps = limit - 1
    return [ranked[(2 * step * (len(ranked) - 1) + gaps) // (2 * gaps)][2] for step in range(limit)]


def _hash(candidate: Candidate) -> bytes:
    return digest_of("shown", candidate.id)
