"""Advantages within groups, and which try of a rollout counts. Everything counts rollouts, never samples."""

import math
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from rolltape.records.policy import Advantage
from rolltape.records.rollout import Outcome, RolloutHead, Status

_SPREAD_OF_EQUALS = 1e-12  # relative to the largest reward


class RewardedRollout(Protocol):
    """A rollout, or a row of a run's index."""

    @property
    def head(self) -> RolloutHead: ...
    @property
    def outcome(self) -> Outcome: ...


A = TypeVar("A", bound=RewardedRollout)


def group_advantages(rewards: Sequence[float | None], kind: Advantage | str) -> list[float | None]:
    """Advantages of a group's rollouts from their rewards, in the same order.

    A rollout without a finite reward has none and is left out of the mean. Equal rewards give 0.
    """
    chosen = Advantage(kind)
    counted = [reward for reward in rewards if reward is not None and math.isfinite(reward)]
    if chosen is Advantage.NONE or not counted:
        return [None] * len(rewards)
    unit = unit_of(max(map(abs, counted)))
    scaled = [reward / unit for reward in counted]
    mean = math.fsum(scaled) / len(scaled)
    spread = math.sqrt(math.fsum((reward - mean) ** 2 for reward in scaled) / len(scaled))
    if spread < _SPREAD_OF_EQUALS:
        # A difference that only rounding causes is no signal.
        return [None if reward is None or not math.isfinite(reward) else 0.0 for reward in rewards]
    factor = 1 / spread if chosen is Advantage.NORMALIZED else unit
    return [
        None if reward is None or not math.isfinite(reward) else (reward / unit - mean) * factor for reward in rewards
    ]


def unit_of(largest: float) -> float:
    """The power of two that scales numbers up to `largest`, so that neither their sum nor a square overflows.

    Dividing by it is exact.
    """
    return math.ldexp(0.5, math.frexp(largest)[1])


def advantages_of(attempts: Iterable[RewardedRollout], kind: Advantage | str) -> dict[tuple[str, int], float | None]:
    """Each rollout's advantage in its group, by rollout and try. Each rollout has only the try that counts."""
    groups: dict[str, list[RewardedRollout]] = {}
    for attempt in counted_tries(attempts):
        groups.setdefault(attempt.head.group, []).append(attempt)
    advantages: dict[tuple[str, int], float | None] = {}
    for members in groups.values():
        values = group_advantages([member.outcome.reward for member in members], kind)
        advantages.update(zip((member.head.key for member in members), values, strict=True))
    return advantages


def counted_tries(attempts: Iterable[A]) -> list[A]:
    """One try of each rollout: the latest finished one, else the latest."""
    chosen: dict[str, A] = {}
    for attempt in sorted(attempts, key=lambda attempt: attempt.head.try_index):
        held = chosen.get(attempt.head.id)
        if held is None or _finished(attempt) or not _finished(held):
            chosen[attempt.head.id] = attempt
    return list(chosen.values())


def _finished(attempt: RewardedRollout) -> bool:
    return attempt.outcome.status is Status.FINISHED
