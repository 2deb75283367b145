"""Add up the rewards of steps and the final one, and compare sums."""

import math
from collections.abc import Iterable

_ROUNDING = 1e-6  # an environment may add its rewards up in single precision


def summed(rewards: Iterable[float]) -> float:
    """The sum, NaN and infinity included."""
    rewards = list(rewards)
    return math.fsum(rewards) if all(map(math.isfinite, rewards)) else sum(rewards)


def agree(total: float, rewards: Iterable[float]) -> bool:
    """Whether rewards add up to a total, up to the rounding of floats."""
    rewards = list(rewards)
    found = summed(rewards)
    if not (math.isfinite(total) and math.isfinite(found)):
        return total == found or (math.isnan(total) and math.isnan(found))
    return abs(total - found) <= _ROUNDING * summed(map(abs, rewards))


def final_reward(total: float, step_rewards: list[float], given: float | None) -> float | None:
    """The final reward that makes up a total together with the steps' rewards.

    That is the one that was given, if it does. Otherwise the total was set later, and the final reward is the rest.
    """
    rewards = step_rewards if given is None else [*step_rewards, given]
    if rewards and agree(total, rewards):
        return given
    return summed([total, *(-reward for reward in step_rewards)])
