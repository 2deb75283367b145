"""The samples of a whole group, with advantages over its rollouts."""

from collections.abc import Iterable, Iterator, Sequence

from rolltape.errors import PolicyError
from rolltape.records.policy import Policy
from rolltape.records.policy import policy as policy_named
from rolltape.records.rollout import Rollout, Status
from rolltape.records.sample import Sample
from rolltape.samples.linearize import linearize
from rolltape.samples.shares import group_advantages


def samples_of_group(
    rollouts: Sequence[Rollout],
    policy: Policy | str = "exact",
    *,
    versions: Sequence[str] = (),
    current_version: str | None = None,
) -> Iterator[Sample]:
    """All samples of one group. A rollout with nothing to train still counts in its mean."""
    groups = {rollout.head.group for rollout in rollouts}
    if len(groups) > 1:
        raise PolicyError(f"{len(rollouts)} rollouts are of {len(groups)} groups; advantages are computed within one")
    chosen = policy_named(policy)
    counted = counted_tries(rollouts)
    advantages = group_advantages([rollout.reward for rollout in counted], chosen.advantage)
    for rollout, advantage in zip(counted, advantages, strict=True):
        linearized = linearize(rollout, chosen, versions=versions, current_version=current_version)
        yield from linearized.samples(advantage)


def counted_tries(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """One try of each rollout: the latest finished one, else the latest."""
    chosen: dict[str, Rollout] = {}
    for rollout in sorted(rollouts, key=lambda rollout: rollout.head.try_index):
        held = chosen.get(rollout.id)
        if held is None or rollout.status is Status.FINISHED or held.status is not Status.FINISHED:
            chosen[rollout.id] = rollout
    return list(chosen.values())
