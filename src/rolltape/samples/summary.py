"""A rollout → its summary: tree and forks are computed once for all policies, and no sample is built."""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from rolltape.errors import LedgerError
from rolltape.records.ledger import Fate
from rolltape.records.policy import PRESETS, CutPolicy
from rolltape.records.rollout import EventKind, Rollout, outcome_of
from rolltape.records.rollout_summary import SUMMARY_RULES, PolicySummary, RolloutSummary
from rolltape.samples.cutting import Cut, cut
from rolltape.samples.fates import CODES, PENDING, Staleness, rollout_fate
from rolltape.samples.linearize import pruned_tokens
from rolltape.tree import Tree, abandoned_turns, forks_of, tree_of


def summarize(rollout: Rollout, policies: Iterable[CutPolicy] = tuple(PRESETS.values())) -> RolloutSummary:
    """Count a rollout's branches, forks, samples and fates, as if it were not filtered. Its turns must be whole."""
    said = [event for event in rollout.events if event.kind != EventKind.FILTER]
    whole_fate = rollout_fate(outcome_of(said, rollout.writer_alive), as_if_finished=False)
    trees = [tree_of(session) for session in rollout.sessions]
    forks = [forks_of(tree) for tree in trees]
    abandoned = [abandoned_turns(tree, forked) for tree, forked in zip(trees, forks, strict=True)]
    pruned = pruned_tokens(rollout)
    cuts = {
        policy: [cut(*known, whole_fate, policy, Staleness()) for known in zip(trees, abandoned, strict=True)]
        for policy in policies
    }
    return RolloutSummary(
        rules=SUMMARY_RULES,
        branches=sum(_branch_count(tree) for tree in trees),
        forks=dict(Counter(fork.cause.value for forked in forks for fork in forked).most_common()),
        policies={policy.name: _policy_summary(policy, made, pruned) for policy, made in cuts.items()},
    )


def _policy_summary(policy: CutPolicy, cuts: list[Cut], pruned: int) -> PolicySummary:
    codes = [fates for made in cuts for fates in made.claims.fates.values()]
    counts = np.bincount(np.concatenate(codes), minlength=PENDING + 1) if codes else np.zeros(PENDING + 1, np.int64)
    trained = sum(draft.trained_tokens for made in cuts for draft in made.drafts)
    if counts[PENDING] or counts[CODES.index(Fate.TRAINED)] != trained:
        raise LedgerError(
            f"{counts[PENDING]} tokens have no fate and {trained} train in samples under policy {policy.key}; "
            "please report this as a bug"
        )
    totals = Counter({fate.value: int(counts[code]) for code, fate in enumerate(CODES) if counts[code]})
    if pruned:
        totals[Fate.DROPPED_PRUNED.value] += pruned
    return PolicySummary(policy.key, sum(len(made.drafts) for made in cuts), dict(totals.most_common()))


def _branch_count(tree: Tree) -> int:
    """How many ends a tree has, auxiliary calls aside."""
    own = (placed for placed in tree.turns if placed.turn.facts.auxiliary is None)
    return sum(all(child.turn.facts.auxiliary is not None for child in placed.children) for placed in own)
