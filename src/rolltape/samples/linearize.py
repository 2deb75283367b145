"""A rollout's turns → its samples and its ledger, under a policy. A pure function of the tape."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from rolltape.errors import LedgerError, PolicyError
from rolltape.records.fork import Fork
from rolltape.records.ledger import Fate, Ledger, LedgerEntry
from rolltape.records.policy import Policy
from rolltape.records.policy import policy as policy_named
from rolltape.records.rollout import EventKind, Rollout, Session
from rolltape.records.sample import Sample
from rolltape.samples.build import built_sample
from rolltape.samples.claims import Claims, Draft
from rolltape.samples.cutting import cut
from rolltape.samples.fates import CODES, PENDING, Fates, Staleness, rollout_fate
from rolltape.samples.shares import loss_weights, reward_shares
from rolltape.tree import Tree, abandoned_turns, forks_of, tree_of


class Linearized:
    """A rollout under a policy: light until its samples are asked for, one at a time."""

    def __init__(self, rollout: Rollout, policy: Policy, sessions: Sequence["LinearizedSession"]) -> None:
        self.rollout = rollout
        self.policy = policy
        self.sessions = tuple(sessions)
        self.ledger = _ledger(rollout, policy, sessions)

    @property
    def trees(self) -> list[Tree]:
        return [session.tree for session in self.sessions]

    @property
    def forks(self) -> list[Fork]:
        return [fork for session in self.sessions for fork in session.forks]

    def __len__(self) -> int:
        """How many samples there are."""
        return sum(len(session.drafts) for session in self.sessions)

    def samples(self, advantage: float | None = None) -> Iterator[Sample]:
        """The samples in order, their arrays made as they are reached. `advantage` is the rollout's in its group."""
        drafts = [(session, draft) for session in self.sessions for draft in session.drafts]
        rewards = reward_shares(self.rollout.reward, len(drafts), self.policy.reward_share)
        weights = loss_weights([draft.trained_tokens for _, draft in drafts], self.policy.loss_weight)
        for index, (session, draft) in enumerate(drafts):
            yield built_sample(
                draft,
                session.claims,
                self.rollout,
                self.policy,
                index=index,
                siblings=len(drafts),
                reward=rewards[index],
                advantage=advantage,
                loss_weight=weights[index],
            )

    def _repr_html_(self) -> str:
        from rolltape.notebook import linearized_html

        return linearized_html(self)


class LinearizedSession:
    """One session under a policy: its tree, why it forks, its drafts, and the fate of each token."""

    def __init__(
        self, session: Session, tree: Tree, forks: Sequence[Fork], claims: Claims, drafts: Sequence[Draft]
    ) -> None:
        self.session = session
        self.tree = tree
        self.forks = tuple(forks)
        self.claims = claims
        self.drafts = tuple(drafts)


def linearize(
    rollout: Rollout,
    policy: Policy | str = "exact",
    *,
    versions: Sequence[str] = (),
    current_version: str | None = None,
    as_if_finished: bool = False,
) -> Linearized:
    """Samples and ledger of a rollout. `versions` is the run's order of weight versions, for the staleness limit.

    A rollout that still runs gives none, unless it is to be looked at `as_if_finished`.
    """
    chosen = policy_named(policy)
    if chosen.max_staleness is not None and not versions:
        raise PolicyError(f"policy {chosen.name}: max_staleness needs the run's versions; give versions=run.versions()")
    staleness = Staleness(versions, current_version)
    whole_fate = rollout_fate(rollout.outcome, as_if_finished=as_if_finished)
    return Linearized(
        rollout, chosen, [_linearized_session(session, whole_fate, chosen, staleness) for session in rollout.sessions]
    )


def _linearized_session(
    session: Session, whole_fate: Fate | None, policy: Policy, staleness: Staleness
) -> LinearizedSession:
    tree = tree_of(session)
    forks = forks_of(tree)
    claims, drafts = cut(tree, abandoned_turns(tree, forks), whole_fate, policy, staleness)
    return LinearizedSession(session, tree, forks, claims, drafts)


def _ledger(rollout: Rollout, policy: Policy, sessions: Sequence[LinearizedSession]) -> Ledger:
    """Where each token went; a gap, or a disagreement with the drafts, is an error."""
    entries = [
        entry
        for session in sessions
        for turn in session.session.turns
        for entry in _entries(turn.id, session.claims.fates[turn.sequence])
    ]
    lengths = [(turn.id, len(turn.sampled_ids)) for turn in rollout.turns]
    pruned = pruned_tokens(rollout)
    if pruned:
        entries.append(LedgerEntry(rollout.id, 0, pruned, Fate.DROPPED_PRUNED))
        lengths.append((rollout.id, pruned))
    ledger = Ledger(
        rollout=rollout.id,
        try_index=rollout.head.try_index,
        policy=policy.key,
        sampled=sum(length for _, length in lengths),
        entries=tuple(entries),
    )
    return ledger.checked(sum(draft.trained_tokens for session in sessions for draft in session.drafts), lengths)


def pruned_tokens(rollout: Rollout) -> int:
    """How many sampled tokens the rollout had before its turns were pruned."""
    said = [event.data for event in rollout.events if event.kind == EventKind.PRUNE]
    return max((int(data.get("sampled_tokens", 0)) for data in said if data.get("pruned") == "turns"), default=0)


def _entries(turn: str, codes: Fates) -> Iterator[LedgerEntry]:
    if not len(codes):
        return
    if PENDING in codes:
        at = int(np.argmax(codes == PENDING))
        raise LedgerError(
            f"turn {turn}: sampled token {at} was neither trained, masked nor dropped; please report this"
        )
    bounds = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
    for start, stop in pairwise(bounds):
        yield LedgerEntry(turn, start, stop, CODES[codes[start]])
