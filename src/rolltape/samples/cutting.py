"""A session's tree → its drafts and the fate of each of its tokens, under a policy."""

from collections.abc import Set
from typing import NamedTuple

from rolltape.records.ledger import Fate
from rolltape.records.policy import CutPolicy
from rolltape.samples.branches import branching, chosen_leaves
from rolltape.samples.claims import Claims, Draft
from rolltape.samples.fates import PENDING, Fates, Staleness, token_fates, turn_fate, unlinked_fate
from rolltape.tree import Tree


class Cut(NamedTuple):
    """A session cut into drafts, and who trains which of its tokens."""

    claims: Claims
    drafts: list[Draft]


def cut(tree: Tree, abandoned: Set[int], whole_fate: Fate | None, policy: CutPolicy, staleness: Staleness) -> Cut:
    """Decide which tokens may train, link the turns, choose the branches, and let each claim its tokens."""
    unlinked = {placed.sequence: unlinked_fate(placed.turn) for placed in tree.turns}
    branches = branching(tree, frozenset(key for key, fate in unlinked.items() if fate is not None), policy)
    fates: dict[int, Fates] = {}
    for placed in tree.turns:
        shared = whole_fate or unlinked[placed.sequence]
        shared = shared or turn_fate(placed, is_abandoned=placed.sequence in abandoned, policy=policy)
        shared = shared or (Fate.MASKED_REWRITTEN if placed.sequence in branches.rewritten else None)
        fates[placed.sequence] = token_fates(placed.turn, shared, policy, staleness)
    may_train = {sequence for sequence, codes in fates.items() if PENDING in codes}
    claims = Claims(fates, policy)
    return Cut(claims, claims.along(chosen_leaves(branches, may_train, policy)))
