"""What is to be done with a group as it stands: give it, with which rollouts; skip it, and why; or wait."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from rolltape.errors import GroupsError
from rolltape.groups.gathering import Gathered, Gathering, is_finished, is_rewarded
from rolltape.records.group import Late
from rolltape.records.policy import Advantage, Credit, CutPolicy
from rolltape.records.rollout import Status
from rolltape.records.sample import Sample
from rolltape.samples.fates import Staleness
from rolltape.tape.run import RolloutRow


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer wants."""

    step: int | None  # None: all
    source: str | None  # None: all
    policy: CutPolicy
    credit: Credit
    max_staleness: int | None  # None: any
    complete: bool
    group_size: int | None  # None: as the collection has it
    straggler_s: float | None  # None: attempts are waited for until the collection ends
    late: Late

    @property
    def needs_rewards(self) -> bool:
        return self.credit.advantage is not Advantage.NONE


class Give(NamedTuple):
    """The rollouts to give, and how many attempts are missing."""

    rows: Sequence[RolloutRow]
    missing: int


class Skip(NamedTuple):
    reason: str


def decided(group: Gathered, gathering: Gathering, wanted: GroupRequest) -> Give | Skip | None:
    """What is to be done with a group now; None: wait."""
    attempts = group.attempts()
    ended = [one for one in attempts if is_finished(one) and (is_rewarded(one) or not wanted.needs_rewards)]
    size = gathering.collectors.size_of(group.part) if wanted.group_size is None else wanted.group_size
    if not wanted.complete:
        return Give(ended, max((size or 0) - len(ended), 0)) if ended else None
    if size is None:
        raise GroupsError(
            f"group {group.id} of step {group.step}: no collection on the tape says how many attempts it has; "
            "give group_size"
        )
    if len(ended) >= size:
        return Give(ended, 0)
    if not _is_time_over(group, attempts, gathering, wanted.straggler_s):
        return None
    if ended and wanted.late is Late.GIVE:
        return Give(ended, size - len(ended))
    return Skip(f"late: {len(ended)} of {size} attempts had finished{' with a reward' * wanted.needs_rewards}")


def _is_time_over(
    group: Gathered, attempts: Sequence[RolloutRow], gathering: Gathering, straggler_s: float | None
) -> bool:
    """Whether attempts that have not ended are waited for no longer."""
    is_late = straggler_s is not None and time.monotonic() - group.last_sign_s > straggler_s
    if any(one.outcome.status is Status.RUNNING for one in attempts):
        # While none has finished those that run are no stragglers. And somebody else may run one, beside a
        # collection that was resumed and has ended.
        return is_late and any(map(is_finished, attempts))
    return is_late or gathering.collectors.is_over(group.part)


def too_old(samples: Sequence[Sample], versions: Sequence[str], limit: int) -> str | None:
    """Why samples are too old: a trained token is of weights more than `limit` versions behind the newest."""
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
