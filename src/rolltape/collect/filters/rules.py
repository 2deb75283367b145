"""Rules: which rollouts are to be kept out of training, and why. They judge finished rollouts, of each the try that
counts, by what the run's index says of them; no turn is read."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rolltape.records.policy import Advantage
from rolltape.records.rollout import Status
from rolltape.samples import counted_tries, group_advantages
from rolltape.samples.fates import Staleness
from rolltape.tape.run import RolloutRow

# Who says so, on the tape.
NO_SPREAD = "no-spread"
STALE = "stale"


class Verdict(NamedTuple):
    """What a rule says of one try of a rollout."""

    rollout: str
    try_index: int
    reason: str | None = None  # why it is kept out of training; None: as far as this rule goes it may train
    unjudged: str | None = None  # why the rule cannot tell; what it said before stands

    @property
    def key(self) -> tuple[str, int]:
        return (self.rollout, self.try_index)


def no_spread(rows: Iterable[RolloutRow]) -> Iterator[Verdict]:
    """Groups whose rewards are all the same: every advantage in them is 0.

    A group without rewards has none to compare and may train. One of which a rollout runs is not judged yet.
    """
    groups: dict[str, list[RolloutRow]] = {}
    for row in counted_tries(rows):
        groups.setdefault(row.head.group, []).append(row)
    for members in groups.values():
        running = any(row.outcome.status is Status.RUNNING for row in members)
        reason = None if running else _sameness([row.outcome.reward for row in members])
        for row in _finished(members):
            yield Verdict(*row.key, reason, unjudged="its group has rollouts that still run" if running else None)


def stale(rows: Iterable[RolloutRow], versions: Sequence[str], limit: int) -> Iterator[Verdict]:
    """Rollouts sampled by weights more than `limit` versions behind the newest; `versions` is the run's order of them.

    A rollout is as old as the oldest version that its replies name. One that names none is not judged.
    """
    staleness = Staleness(versions)
    too_old = f"more than {limit} version{'' if limit == 1 else 's'} behind the newest"
    for row in _finished(counted_tries(rows)):
        ages = {version: age for version in row.versions if (age := staleness.of(version)) is not None}
        if not ages:
            yield Verdict(*row.key, unjudged="its replies name no weight version")
            continue
        oldest = max(ages, key=ages.__getitem__)
        yield Verdict(*row.key, f"sampled by weights {oldest}, {too_old}" if ages[oldest] > limit else None)


def _finished(rows: Iterable[RolloutRow]) -> Iterator[RolloutRow]:
    return (row for row in rows if row.outcome.status is Status.FINISHED)


def _sameness(rewards: Sequence[float | None]) -> str | None:
    """In which way a group's rewards have no spread; None: they have, or there are none."""
    advantages = group_advantages(rewards, Advantage.CENTERED)
    if not any(advantage is not None for advantage in advantages) or any(advantages):
        return None
    counted = [reward for reward in rewards if reward is not None and math.isfinite(reward)]
    if len(counted) == 1:
        return "its group has one reward"
    return f"all {len(counted)} rewards of its group are {counted[0]:.6g}"
