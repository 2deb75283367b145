"""Chosen rollouts → their samples and ledgers under a policy, with advantages over whole groups."""

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

from rolltape.cli.output.screen import tracked
from rolltape.cli.runs import Chosen
from rolltape.records.policy import Credit, CutPolicy
from rolltape.records.sample import Sample

if TYPE_CHECKING:
    from rolltape.samples import Linearized


def linearized(chosen: Chosen, policy: CutPolicy, credit: Credit | None = None) -> Iterator["Linearized"]:
    """Each chosen rollout under the policy, with a progress bar."""
    from rolltape.samples import linearize

    versions = chosen.opened.run.versions()
    for rollout in tracked(chosen, policy.name, len(chosen)):
        yield linearize(rollout, policy, credit=credit, versions=versions)


def samples_of(chosen: Chosen, policy: CutPolicy, credit: Credit) -> Generator[Sample, None, None]:
    """Every sample of the chosen rollouts, with advantages over whole groups."""
    from rolltape.samples import advantages_of

    advantages = advantages_of(chosen.opened.rows, credit.advantage)
    for made in linearized(chosen, policy, credit):
        yield from made.samples(advantage=advantages.get(made.rollout.key))
