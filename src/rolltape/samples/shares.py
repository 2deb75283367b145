"""How a rollout's reward, advantage and weight reach its samples. Everything counts rollouts, never samples."""

import math
from collections.abc import Sequence

from rolltape.records.policy import Advantage, LossWeight, RewardShare


def reward_shares(reward: float | None, samples: int, share: RewardShare) -> list[float | None]:
    """Each sample's reward: the whole one, or even shares that sum to it."""
    if reward is None or share is RewardShare.FULL or samples < 2:
        return [reward] * samples
    part = reward / samples
    return [*([part] * (samples - 1)), reward - part * (samples - 1)]


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
    mean = math.fsum(counted) / len(counted)
    spread = math.sqrt(math.fsum((reward - mean) ** 2 for reward in counted) / len(counted))
    scale = spread if chosen is Advantage.NORMALIZED and spread > 0 else 1.0
    return [None if reward is None or not math.isfinite(reward) else (reward - mean) / scale for reward in rewards]
