"""How a rollout's reward, advantage and weight reach its samples. Everything counts rollouts, never samples."""

import math
from collections.abc import Sequence

from rolltape.records.policy import Advantage, LossWeight, RewardShare

_SPREAD_OF_EQUALS = 1e-12  # relative to the largest reward


def reward_shares(reward: float | None, samples: int, share: RewardShare) -> list[float | None]:
    """Each sample's reward: the whole one, or even shares that sum to it."""
    if reward is None or share is RewardShare.FULL or samples < 2 or not math.isfinite(reward):
        return [reward] * samples
    parts = [reward / samples] * (samples - 1)
    return [*parts, math.fsum([reward, *(-part for part in parts)])]


def loss_weights(trained_tokens: Sequence[int], share: LossWeight) -> list[float]:
    """A rollout's weight of 1, shared among its samples."""
    if share is LossWeight.EVEN:
        return [1 / len(trained_tokens) for _ in trained_tokens]
    total = sum(trained_tokens)
    return [tokens / total for tokens in trained_tokens]


def group_advantages(rewards: Sequence[float | None], kind: Advantage | str) -> list[float | None]:
    """Advantages of a group's rollouts from their rewards, in the same order.

    A rollout without a finite reward has none and is left out of the mean. Equal rewards give 0.
    """
    chosen = Advantage(kind)
    counted = [reward for reward in rewards if reward is not None and math.isfinite(reward)]
    if chosen is Advantage.NONE or not counted:
        return [None] * len(rewards)
    # Scaled by a power of two, which changes no digit, so that neither the sum nor a square can overflow.
    unit = math.ldexp(0.5, math.frexp(max(map(abs, counted)))[1])
    scaled = [reward / unit for reward in counted]
    mean = math.fsum(scaled) / len(scaled)
    spread = math.sqrt(math.fsum((reward - mean) ** 2 for reward in scaled) / len(scaled))
    if spread < _SPREAD_OF_EQUALS:
        # What rounding leaves of a difference between equal rewards is no signal.
        return [None if reward is None or not math.isfinite(reward) else 0.0 for reward in rewards]
    factor = 1 / spread if chosen is Advantage.NORMALIZED else unit
    return [
        None if reward is None or not math.isfinite(reward) else (reward / unit - mean) * factor for reward in rewards
    ]
