"""Decides about a pending group: give it and with which rollouts, skip it and why, or wait."""

import enum
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from rolltape.errors import GroupsError
from rolltape.groups.pending import Collections, PendingGroup, is_finished, is_rewarded
from rolltape.records.jsonable import plain_scalar, shown
from rolltape.records.policy import Advantage, Credit, CutPolicy
from rolltape.records.rollout import Status
from rolltape.records.sample import Sample
from rolltape.samples.claims import Staleness
from rolltape.tape.run import RolloutRow


class Late(enum.StrEnum):
    """What to do with a group that still lacks attempts when its time is over."""

    GIVE = "give"  # without them
    SKIP = "skip"


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which groups a trainer requests. `groups` explains the fields."""

    step: int | None = None  # None: all
    source: str | None = None  # None: all
    task_ids: frozenset[str] | None = None  # None: all
    policy: CutPolicy
    credit: Credit
    max_staleness: int | None = None  # None: any
    complete: bool = True
    with_empty: bool = False  # give groups with nothing to train too
    consumer: str = "trainer"
    group_size: int | None = None  # None: as the collection has it
    straggler_s: float | None = 600.0  # None: attempts are waited for until the collection ends
    late: Late = Late.GIVE
    limit: int | None = None  # None: any number of groups
    idle_s: float | None = None  # None: any time
    resume_s: float | None = 60.0  # None: any time
    poll_s: float = 0.2

    def __post_init__(self) -> None:
        for name, least in (("step", 0), ("group_size", 1), ("max_staleness", 0), ("limit", 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(plain_scalar(value), int) or value < least):
                raise GroupsError(f"{name} is {shown(value)}; give a whole number from {least} up")
        for name in ("straggler_s", "idle_s", "resume_s", "poll_s"):
            value = getattr(self, name)
            if value is not None and not (isinstance(plain_scalar(value), int | float) and value >= 0):
                raise GroupsError(f"{name} is {shown(value)}; give seconds, 0 or more")

    @property
    def needs_rewards(self) -> bool:
        return self.credit.advantage is not Advantage.NONE


class Give(NamedTuple):
    """The rollouts to give, the attempts that are left out, and how many are missing, also those not begun."""

    rows: Sequence[RolloutRow]
    others: Sequence[RolloutRow]
    missing: int


class Skip(NamedTuple):
    """Why a group is not given."""

    reason: str


def decide(group: PendingGroup, collections: Collections, request: GroupRequest) -> Give | Skip | None:
    """What to do with a group now, or None to wait."""
    attempts = group.attempts()
    ended = [one for one in attempts if is_finished(one) and (is_rewarded(one) or not request.needs_rewards)]
    others = [one for one in attempts if one not in ended]
    size = collections.group_size(group.collection) if request.group_size is None else request.group_size
    if not request.complete:
        give = Give(ended, others, max((size or len(attempts)) - len(ended), 0))
        return give if ended or request.with_empty else None
    if size is None:
        raise GroupsError(
            f"group {group.id} of step {group.step}: no collection on the tape says how many attempts it has; "
            "give group_size"
        )
    if len(ended) >= size:
        return Give(ended, others, 0)
    if not _is_time_over(group, attempts, collections, request.straggler_s):
        return None
    if (ended or request.with_empty) and request.late is Late.GIVE:
        return Give(ended, others, size - len(ended))
    return Skip(f"late: {len(ended)} of {size} attempts had finished{' with a reward' * request.needs_rewards}")


def _is_time_over(
    group: PendingGroup, attempts: Sequence[RolloutRow], collections: Collections, straggler_s: float | None
) -> bool:
    """Whether to stop waiting for attempts that have not ended."""
    is_late = straggler_s is not None and time.monotonic() - group.last_change_s > straggler_s
    if any(one.outcome.status is Status.RUNNING for one in attempts):
        # While no attempt has finished, running ones are no stragglers. And an attempt of another process may still run
        # when a resumed collection has ended.
        return is_late and any(map(is_finished, attempts))
    return is_late or collections.is_over(group.collection)


def explain_staleness(samples: Sequence[Sample], versions: Sequence[str], limit: int) -> str | None:
    """Why samples are stale: a trained token is more than `limit` weight versions behind the newest. Else None."""
    staleness = Staleness(versions)
    for sample in samples:
        used = set(sample.version_index[sample.trained_mask].tolist())
        if -1 in used:
            return f"stale: trained tokens of sample {sample.id} name no weight version"
        for oldest, _ in (sample.versions[index] for index in used):
            age = staleness.of(oldest)
            if age is None or age > limit:
                return f"stale: sampled by weights {oldest}, the newest are {versions[-1]}, max_staleness is {limit}"
    return None
