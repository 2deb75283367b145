"""A rollout that has ended → the figures that lists and plots need of it. Derived once, and kept."""

import msgspec

from rolltape.records.policy import Policy
from rolltape.records.rollout import EventKind, Rollout
from rolltape.samples import linearize
from rolltape.tree import Tree

# Raised when the same rollout would come to other figures than before; part of the cache's name.
SUMMARY_VERSION = 1


class Summary(msgspec.Struct, frozen=True):
    """Figures of a rollout under a policy. The ledger is as if it were not filtered, which is looked up by itself."""

    branches: int
    samples: int
    forks: dict[str, int]  # by cause
    ledger: dict[str, int]  # by fate


def summary_of(rollout: Rollout, policy: Policy) -> Summary:
    """The figures of a rollout."""
    said = [event for event in rollout.events if event.kind != EventKind.FILTER]
    linearized = linearize(Rollout(rollout.head, rollout.sessions, said, rollout.writer_alive), policy)
    forks: dict[str, int] = {}
    for fork in linearized.forks:
        forks[fork.cause.value] = forks.get(fork.cause.value, 0) + 1
    return Summary(
        branches=sum(branch_count(tree) for tree in linearized.trees),
        samples=len(linearized),
        forks=forks,
        ledger={fate.value: tokens for fate, tokens in linearized.ledger.totals().items()},
    )


def branch_count(tree: Tree) -> int:
    """How many ends a tree has, auxiliary calls aside."""
    own = (placed for placed in tree.turns if placed.turn.facts.auxiliary is None)
    return sum(all(child.turn.facts.auxiliary is not None for child in placed.children) for placed in own)
