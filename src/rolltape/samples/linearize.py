"""A rollout's turns → its samples and its ledger, under a policy. A pure function of the tape."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby

from rolltape.errors import LedgerError, PolicyError, RecordError
from rolltape.records.fork import Fork
from rolltape.records.policy import Credit, CutPolicy, cut_and_credit
from rolltape.records.rollout import EventKind, Rollout
from rolltape.records.sample import Fate, Ledger, LedgerEntry, Sample, SampleOutline
from rolltape.samples.build import built_sample, outlined, trained_ranges
from rolltape.samples.claims import (
    FateRun,
    LinearizedSession,
    PlacedSession,
    SampleDraft,
    Staleness,
    cut,
    rollout_fate,
)
from rolltape.samples.credit import RewardedRollout, advantages_of, counted_tries
from rolltape.tree import Tree


class Linearized:
    """A rollout under a cut policy. Its samples are built one at a time, when they are requested.

    Example:

        made = rolltape.linearize(rollout, "exact")
        print(len(made), made.ledger.totals())
        first = made.sample(0)
    """

    def __init__(
        self, rollout: Rollout, policy: CutPolicy, credit: Credit, sessions: Sequence[LinearizedSession]
    ) -> None:
        self.rollout = rollout
        self.policy = policy
        self.credit = credit
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

    @cached_property
    def outlines(self) -> tuple[SampleOutline, ...]:
        """Each sample without its arrays, which are as long as all branches together."""
        drafts = [draft for _, draft in self._drafts]
        rewards = self.credit.shares(self.rollout.reward, len(drafts))
        weights = self.credit.weights([draft.trained_tokens for draft in drafts])
        ranges = [
            found for one in self.sessions for found in trained_ranges(one.session.turns, one.claims.runs, one.drafts)
        ]
        return tuple(
            outlined(draft, index, trained, reward, weight)
            for index, (draft, trained, reward, weight) in enumerate(zip(drafts, ranges, rewards, weights, strict=True))
        )

    def sample(self, index: int, advantage: float | None = None) -> Sample:
        """One sample, built alone. `advantage` is the rollout's in its group."""
        if not 0 <= index < len(self):
            raise IndexError(
                f"rollout {self.rollout.id} has {len(self)} samples under {self.policy.name}, none {index}"
            )
        session, draft = self._drafts[index]
        return built_sample(
            draft, session.claims, self.outlines[index], self.rollout, self.policy, advantage, len(self)
        )

    def samples(self, advantage: float | None = None) -> Iterator[Sample]:
        """The samples in order, their arrays made as they are reached. `advantage` is the rollout's in its group."""
        return (self.sample(index, advantage) for index in range(len(self)))

    def index_of(self, sample_id: str) -> int | None:
        """The place of the sample with that id, or None if this policy makes no such sample."""
        return next((outline.index for outline in self.outlines if outline.id == sample_id), None)

    @cached_property
    def _drafts(self) -> list[tuple[LinearizedSession, SampleDraft]]:
        return [(session, draft) for session in self.sessions for draft in session.drafts]

    def take_apart(self) -> None:
        """Free the trees, which contain reference cycles. This object cannot be used afterwards."""
        for tree in self.trees:
            tree.take_apart()

    def _repr_html_(self) -> str:
        from rolltape.notebook import linearized_html

        return linearized_html(self)


def linearize(
    rollout: Rollout,
    policy: CutPolicy | str = "exact",
    *,
    credit: Credit | None = None,
    versions: Sequence[str] = (),
    current_version: str | None = None,
    as_if_finished: bool = False,
) -> Linearized:
    """Samples and ledger of a rollout. `versions` is the run's order of weight versions, for the staleness limit.

    Example:

        made = rolltape.linearize(rollout, "exact", credit=rolltape.Credit(reward_share="split"))

    A rollout that still runs has no samples, unless `as_if_finished` is true.
    """
    (made,) = linearize_under(
        rollout,
        [policy],
        credit=credit,
        versions=versions,
        current_version=current_version,
        as_if_finished=as_if_finished,
    )
    return made


def linearize_under(
    rollout: Rollout,
    policies: Iterable[CutPolicy | str],
    *,
    credit: Credit | None = None,
    versions: Sequence[str] = (),
    current_version: str | None = None,
    as_if_finished: bool = False,
) -> list[Linearized]:
    """A rollout under several cut policies; its trees are computed once, and its forks when they are asked for."""
    staleness = Staleness(versions, current_version)
    whole_fate = rollout_fate(rollout.outcome, as_if_finished=as_if_finished)
    placed = [PlacedSession(session) for session in rollout.sessions]
    made = []
    for policy in policies:
        cutting, crediting = cut_and_credit(policy, credit)
        if cutting.max_staleness is not None and not versions:
            raise PolicyError(
                f"policy {cutting.name}: max_staleness needs the run's versions; give versions=run.versions()"
            )
        sessions = [cut(one, whole_fate, cutting, staleness) for one in placed]
        made.append(Linearized(rollout, cutting, crediting, sessions))
    return made


def samples_of_group(
    rollouts: Sequence[Rollout],
    policy: CutPolicy | str = "exact",
    *,
    credit: Credit | None = None,
    versions: Sequence[str] = (),
    current_version: str | None = None,
) -> Iterator[Sample]:
    """All samples of one group. A rollout with nothing to train still counts in its mean.

    Example:

        samples = rolltape.samples_of_group(rollouts, "exact", credit=rolltape.Credit(advantage="normalized"))
    """
    groups = {rollout.head.group for rollout in rollouts}
    if len(groups) > 1:
        raise PolicyError(f"{len(rollouts)} rollouts are of {len(groups)} groups; advantages are computed within one")
    cutting, crediting = cut_and_credit(policy, credit)
    advantages = advantages_of(rollouts, crediting.advantage)
    for rollout in counted_tries(rollouts):
        made = linearize(rollout, cutting, credit=crediting, versions=versions, current_version=current_version)
        yield from made.samples(advantages[rollout.key])


def linearize_each(
    rollouts: Iterable[Rollout], policy: CutPolicy, credit: Credit | None = None, versions: Sequence[str] = ()
) -> Iterator[Linearized]:
    """Each rollout under the policy. Use it before you take the next one: its trees are freed then."""
    for rollout in rollouts:
        made = linearize(rollout, policy, credit=credit, versions=versions)
        yield made
        made.take_apart()


def samples_of_rollouts(
    rollouts: Iterable[Rollout],
    listed: Iterable[RewardedRollout],
    policy: CutPolicy,
    credit: Credit,
    versions: Sequence[str] = (),
    leave_out: Callable[[str, RecordError], None] | None = None,
) -> Generator[Sample, None, None]:
    """Every sample of some rollouts, with advantages over whole groups: `listed` are all rollouts of the run.

    `leave_out` is called with the rollout of a sample that cannot be built, and why. Without it, this raises.
    """
    advantages = advantages_of(listed, credit.advantage)
    for made in linearize_each(rollouts, policy, credit, versions):
        for index in range(len(made)):
            try:
                sample = made.sample(index, advantages.get(made.rollout.key))
            except RecordError as error:
                if leave_out is None:
                    raise
                leave_out(made.rollout.id, error)
            else:
                yield sample


def _ledger(rollout: Rollout, policy: CutPolicy, sessions: Sequence[LinearizedSession]) -> Ledger:
    """Where each token went; a gap, or a disagreement with the drafts, is an error."""
    entries = [
        entry
        for session in sessions
        for turn in session.session.turns
        for entry in _entries(turn.id, session.claims.runs[turn.sequence])
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
    pruned = [event.data for event in rollout.events if event.kind == EventKind.PRUNE]
    return max((int(data.get("sampled_tokens", 0)) for data in pruned if data.get("pruned") == "turns"), default=0)


def _entries(turn: str, runs: Iterable[FateRun]) -> Iterator[LedgerEntry]:
    for fate, equal in groupby(runs, key=lambda run: run.fate):
        first, *others = equal
        if fate is None:
            raise LedgerError(
                f"turn {turn}: sampled token {first.start} was neither trained, masked nor dropped; please report this"
            )
        yield LedgerEntry(turn, first.start, others[-1].stop if others else first.stop, fate)
