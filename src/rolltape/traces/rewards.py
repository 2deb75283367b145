"""Rewards of steps, the final one, and their total."""

import math
from collections.abc import Iterable

_ROUNDING = 1e-6  # an environment may add its rewards up in single precision


def summed(rewards: Iterable[float]) -> float:
    """The sum, NaN and infinity included."""
    rewards = list(rewards)
    return math.fsum(rewards) if all(map(math.isfinite, rewards)) else sum(rewards)


def agree(total: float, rewards: Iterable[float]) -> bool:
    """Whether rewards add up to a total, but for the rounding of floats."""
    rewards = list(rewards)
    found = summed(rewards)
    if not (math.isfinite(total) and math.isfinite(found)):
        return total == found or (math.isnan(total) and math.isnan(found))
    return abs(total - found) <= _ROUNDING * summed(map(abs, rewards))


def rest(total: float, rewards: Iterable[float]) -> float:
    """What has to come on top of rewards to give a total."""
    return summed([total, *(-reward for reward in rewards)])


def final_of(total: float, step_rewards: list[float], said: float | None) -> float | None:
    """The final reward that the steps' add up to a total with: the one that was said, if it does.

    Else a reward came later, or again, and is the new total; what the steps did not give is then the final one.
    """
    rewards = step_rewards if said is None else [*step_rewards, said]
    return said if rewards and agree(total, rewards) else rest(total, step_rewards)
