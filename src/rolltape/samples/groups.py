"""Groups: which try of a rollout counts, advantages over rollouts, and the samples of a whole group."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from rolltape.errors import PolicyError
from rolltape.records.policy import Advantage, Policy
from rolltape.records.policy import policy as policy_named
from rolltape.records.rollout import Outcome, Rollout, RolloutHead, Status
from rolltape.records.sample import Sample
from rolltape.samples.linearize import linearize
from rolltape.samples.shares import group_advantages


class Attempt(Protocol):
    """A rollout, or a row of a run's index."""

    @property
    def head(self) -> RolloutHead: ...
    @property
    def outcome(self) -> Outcome: ...


A = TypeVar("A", bound=Attempt)


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
    advantages = advantages_of(rollouts, chosen.advantage)
    for rollout in counted_tries(rollouts):
        linearized = linearize(rollout, chosen, versions=versions, current_version=current_version)
        yield from linearized.samples(advantages[rollout.key])


def advantages_of(attempts: Iterable[Attempt], kind: Advantage | str) -> dict[tuple[str, int], float | None]:
    """Each rollout's advantage in its group, by rollout and try; of each rollout the try that counts."""
    groups: dict[str, list[Attempt]] = {}
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


def _finished(attempt: Attempt) -> bool:
    return attempt.outcome.status is Status.FINISHED
