"""A rollout that has ended → the figures that lists and plots need of it. Derived once, and kept."""

import msgspec

from rolltape.records.policy import CutPolicy
from rolltape.records.rollout import Rollout
from rolltape.samples import summarize

# Raised when the same rollout would come to other figures than before; part of the cache's name.
SUMMARY_VERSION = 1


class Summary(msgspec.Struct, frozen=True):
    """Figures of a rollout under a policy. The ledger is as if it were not filtered, which is looked up by itself."""

    branches: int
    samples: int
    forks: dict[str, int]  # by cause
    ledger: dict[str, int]  # by fate


def summary_of(rollout: Rollout, policy: CutPolicy) -> Summary:
    """The figures of a rollout."""
    made = summarize(rollout, [policy])
    under = made.policies[policy.name]
    return Summary(branches=made.branches, samples=under.samples, forks=made.forks, ledger=under.ledger)
