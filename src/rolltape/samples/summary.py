"""A rollout → its summary: tree and forks are computed once for all policies, and no sample is built.

`open_for_recording` opens a run whose rollouts are summarized as they end.
"""

import os
from collections import Counter

import numpy as np

from rolltape.records.policy import PRESETS, Credit
from rolltape.records.rollout import EventKind, Rollout, outcome_of
from rolltape.records.sample import SUMMARY_RULES, PolicySummary, RolloutSummary
from rolltape.samples.behavior import count_behavior
from rolltape.samples.claims import PlacedSession, Staleness, cut, rollout_fate
from rolltape.samples.linearize import Linearized, pruned_tokens
from rolltape.tape.journal.writing import Durability
from rolltape.tape.recording.tape import Tape, open_tape
from rolltape.tree import Arrivals, Tree


def open_for_recording(
    path: str | os.PathLike[str], name: str | None = None, durability: Durability | str = Durability.PROCESS
) -> Tape:
    """Open the run at `path` for recording. A new run is created if there is none, named after its directory.

    When a rollout has ended, its summary (forks, and where its sampled tokens go) is computed in the background and
    added to the tape, so that a list of the run need not compute it.

    Example:

        tape = rolltape.open("runs/exp1")
    """
    return open_tape(path, name, durability, summarize)


def summarize(rollout: Rollout) -> RolloutSummary:
    """Count a rollout's branches, forks, samples, fates and behavior, as if it were not filtered. Its turns must be
    whole."""
    events = [event for event in rollout.events if event.kind != EventKind.FILTER]
    whole_fate = rollout_fate(outcome_of(events, rollout.writer_alive), as_if_finished=False)
    placed = [PlacedSession(session) for session in rollout.sessions]
    forks = Counter(fork.cause.value for one in placed for fork in one.forks)
    is_plain = all(_is_plain(one.tree, one.arrivals) for one in placed)  # then all presets make the same samples
    made: Linearized | None = None
    counted: dict[str, PolicySummary] = {}
    for policy in PRESETS.values():
        if made is None or not is_plain:
            cuts = [cut(one, whole_fate, policy, Staleness()) for one in placed]
            made = Linearized(rollout, policy, Credit(), cuts)
        ledger = {fate.value: tokens for fate, tokens in made.ledger.totals().items()}
        counted[policy.name] = PolicySummary(policy.key, len(made), ledger)
    behavior = None if pruned_tokens(rollout) else count_behavior(rollout)
    branches = sum(_branch_count(one.tree) for one in placed)
    summary = RolloutSummary(SUMMARY_RULES, branches, dict(forks.most_common()), counted, behavior)
    for one in placed:
        one.tree.take_apart()
    return summary


def _is_plain(tree: Tree, arrivals: Arrivals) -> bool:
    """Whether no turn has anything that one preset trains and another does not."""
    return not (arrivals.abandoned or arrivals.heads) and all(
        placed.message_parent in (None, placed.continues)
        and not placed.rewritten
        and not placed.turn.facts.is_constrained
        and placed.turn.logprobs is not None
        and not np.isnan(placed.turn.logprobs).any()
        for placed in tree.turns
    )


def _branch_count(tree: Tree) -> int:
    """How many ends a tree has, auxiliary calls aside."""
    return sum(placed.is_task and not any(child.is_task for child in placed.children) for placed in tree.turns)
