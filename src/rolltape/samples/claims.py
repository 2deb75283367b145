"""A session's tree → its drafts, and the fate of each sampled token.

First it is decided which tokens may train at all, then branches are cut, then each draft claims its tokens: every token
trains at most once.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rolltape.records.fork import Fork
from rolltape.records.policy import CutPolicy
from rolltape.records.rollout import Outcome, Session, Status
from rolltape.records.sample import Fate
from rolltape.records.turn import Delivery, Finish, Segment, Turn, TurnFlag
from rolltape.samples.branches import Link, branching, chosen_leaves
from rolltape.tree import Arrivals, arrivals_of, forks_of, tree_of

NOBODY = -1


class FateRun(NamedTuple):
    """Sampled tokens `[start, stop)` of one turn that have one fate."""

    start: int
    stop: int
    fate: Fate | None  # None: some draft may still claim them
    draft: int = NOBODY  # the number of the draft that trains them


class Staleness:
    """How old a weight version is, by the order of the run's versions and the version that trains now."""

    def __init__(self, versions: Sequence[str] = (), current: str | None = None) -> None:
        self._versions = versions
        self._current = current

    @cached_property
    def _order(self) -> dict[str, int]:  # a run may have thousands, and most policies have no staleness limit
        return {version: index for index, version in enumerate(self._versions)}

    @cached_property
    def _now(self) -> int | None:
        return len(self._versions) - 1 if self._current is None else self._order.get(self._current)

    def of(self, version: str | None) -> int | None:
        """How many versions lie between it and the current one, or None if either is unknown."""
        index = None if version is None else self._order.get(version)
        return None if index is None or self._now is None else self._now - index


class PlacedSession:
    """A session with its tree, which is the same under every policy."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.tree = tree_of(session)
        self.arrivals = arrivals_of(self.tree)
        self.faults = session.unstated_faults().keys()  # if its recorder did not check

    @cached_property
    def forks(self) -> tuple[Fork, ...]:
        return tuple(forks_of(self.tree))


class LinearizedSession:
    """One session under a policy: its tree, why it forks, its drafts, and the fate of each token."""

    def __init__(self, placed: PlacedSession, claims: "Claims", drafts: "Sequence[SampleDraft]") -> None:
        self._placed = placed
        self.session = placed.session
        self.tree = placed.tree
        self.claims = claims
        self.drafts = drafts

    @property
    def forks(self) -> tuple[Fork, ...]:
        return self._placed.forks


def cut(
    placed_session: PlacedSession, whole_fate: Fate | None, policy: CutPolicy, staleness: Staleness
) -> LinearizedSession:
    """Decide which tokens may train, link the turns, choose the branches, and let each claim its tokens."""
    tree, arrivals, faults = placed_session.tree, placed_session.arrivals, placed_session.faults
    unlinked = {placed.sequence: fate for placed in tree.turns if (fate := unlinked_fate(placed.turn)) is not None}
    branches = branching(tree, unlinked.keys(), arrivals.heads, policy)
    runs: dict[int, list[FateRun]] = {}
    for turn in (placed.turn for placed in tree.turns):
        shared = whole_fate or unlinked.get(turn.sequence) or turn_fate(turn, turn.sequence in faults, arrivals, policy)
        if shared is None and turn.sequence in branches.rewritten:
            shared = Fate.MASKED_REWRITTEN
        own = token_runs(turn, shared, policy, staleness)
        head = arrivals.heads.get(turn.sequence) if shared is None else None
        runs[turn.sequence] = own if head is None else _cut_after(own, head, _doubt(turn))
    claims = Claims(runs, policy)
    ends = branches.ends(claims.may_train)
    leaves = chosen_leaves(branches, claims.may_train, ends, policy)
    return LinearizedSession(placed_session, claims, claims.along(leaves, ends))


@dataclass(slots=True, eq=False)
class SampleDraft:
    """A sample before its arrays are made: it ends with `end`, and its ids are the first `length` of that turn's."""

    end: Link
    number: int
    length: int
    trained_tokens: int = 0

    @property
    def truncated(self) -> bool:
        """Whether its last reply was cut, by a limit, or its conversation had no room for another one."""
        last = self.end.turn
        return self.end.ran_out or last.facts.finish is Finish.LENGTH or self.length < len(last.tokens)


class Claims:
    """One session's tokens: the fate of each and the draft that trains it, as runs of equal ones."""

    def __init__(self, runs: dict[int, list[FateRun]], policy: CutPolicy) -> None:
        self.runs = runs  # by sequence number
        self.may_train = {sequence for sequence, own in runs.items() if any(run.fate is None for run in own)}
        self._policy = policy
        self._drafts: dict[int, SampleDraft] = {}  # by the sequence number of their last turn
        self._ends: Mapping[int, Link | None] = {}  # the nearest turn that may train, at or above each
        self._reached: dict[int, int] = {}  # by turn: how many leading ids have nothing left to claim
        self._first_branch: dict[int, int] = {}  # slime: the branch that reached a turn first
        self._out_of_reach: dict[int, Fate] = {}  # why the first draft that holds a turn cannot train all of it
        self._visited: set[int] = set()

    def along(self, leaves: Iterable[Link], ends: Mapping[int, Link | None]) -> list[SampleDraft]:
        """The drafts that train something, in the order of their last turns."""
        self._ends = ends
        if self._policy.claim_before_cut:
            self._claim_by_branch(leaves)
        else:
            self._claim_by_leaf(leaves)
        self._settle_what_is_left()
        return [draft for _, draft in sorted(self._drafts.items()) if draft.trained_tokens]

    def _claim_by_leaf(self, leaves: Iterable[Link]) -> None:
        """Let leaves claim, then the ends inside branches, latest first: a draft follows all drafts that contain it."""
        inner: dict[int, Link] = {}
        for leaf in leaves:
            inner.update(self._claim(leaf))
        for sequence in reversed(self.runs):
            if sequence in inner:
                inner.update(self._claim(inner[sequence]))

    def _claim_by_branch(self, leaves: Iterable[Link]) -> None:
        """Let one branch claim after the other, each with all its drafts from its start on, as slime does."""
        seen: set[int] = set()
        for branch, leaf in enumerate(leaves):
            ends = [leaf]
            link: Link | None = leaf
            while link is not None and link.turn.sequence not in seen:
                seen.add(link.turn.sequence)
                if (other := self._inner_end(link)) is not None:
                    ends.append(other)
                link = link.before
            for end in reversed(ends):
                self._claim(end, branch)

    def _claim(self, end: Link, branch: int = 0) -> dict[int, Link]:
        """Claim what a draft may train, from its end upwards. Return the ends of other drafts on the way."""
        inner: dict[int, Link] = {}
        if end.turn.sequence in self._drafts:
            return inner
        whole, most = len(end.turn.tokens), self._policy.max_sample_tokens
        length = whole if most is None else min(whole, most)
        draft = self._drafts[end.turn.sequence] = SampleDraft(end, len(self._drafts), length)
        link: Link | None = end
        limit, replaced = draft.length, False
        while link is not None and self._reached.get(link.turn.sequence, -1) < limit:
            self._reached[link.turn.sequence] = limit
            self._claim_turn(draft, link, branch, limit, replaced)
            if (other := self._inner_end(link)) is not None:
                inner[other.turn.sequence] = other
            step, link = link.step, link.continues
            replaced = step is not None and step.replaces_reply
            if step is not None and link is not None:
                limit = min(limit, len(link.turn.prompt_tokens) if replaced else step.kept)
        return inner

    def _inner_end(self, link: Link) -> Link | None:
        """The end of the draft that a branch leaves at this turn, or None if the turn continues the same draft."""
        before = link.before
        return self._ends[before.turn.sequence] if before is not None and before is not link.continues else None

    def _claim_turn(self, draft: SampleDraft, link: Link, branch: int, limit: int, replaced: bool) -> None:
        sequence, start, count = link.turn.sequence, len(link.turn.prompt_tokens), len(link.turn.sampled_ids)
        self._visited.add(sequence)
        reach = min(max(limit - start, 0), count)
        if self._policy.claim_before_cut and self._first_branch.setdefault(sequence, branch) != branch:
            claimed = FateRun(0, reach, Fate.MASKED_TRAINED_IN_OTHER_SAMPLE)
        else:
            claimed = FateRun(0, reach, Fate.TRAINED, draft.number)
        runs = self.runs[sequence] = list(_with_claim(self.runs[sequence], claimed))
        draft.trained_tokens += sum(run.stop - run.start for run in runs if run.draft == draft.number)
        if reach < count:
            beyond = Fate.MASKED_REPLACED if replaced else Fate.MASKED_REWRITTEN_AFTER
            cut = draft.length < len(draft.end.turn.tokens) and start + reach >= draft.length
            self._out_of_reach.setdefault(sequence, Fate.DROPPED_LENGTH if cut and not replaced else beyond)

    def _settle_what_is_left(self) -> None:
        """Give each token that no draft claimed its reason. Without a reason it has no fate: the ledger raises."""
        for sequence, runs in self.runs.items():
            reason = self._out_of_reach.get(sequence) if sequence in self._visited else Fate.DROPPED_BRANCH
            self.runs[sequence] = [run if run.fate else run._replace(fate=reason) for run in runs]


def _with_claim(runs: Iterable[FateRun], claimed: FateRun) -> Iterator[FateRun]:
    """A reply's runs after `claimed` has taken the tokens of its range that had no fate yet."""
    for run in runs:
        if run.fate is not None or run.start >= claimed.stop:
            yield run
            continue
        yield claimed._replace(start=run.start, stop=min(run.stop, claimed.stop))
        if claimed.stop < run.stop:
            yield run._replace(start=claimed.stop)


def _cut_after(runs: Sequence[FateRun], count: int, fate: Fate | None) -> list[FateRun]:
    """The runs of a reply of which only the first `count` tokens arrived. The others get this fate."""
    kept = [run._replace(stop=min(run.stop, count)) for run in runs if run.start < count]
    return [*kept, FateRun(count, runs[-1].stop, fate)] if count < runs[-1].stop else kept


def rollout_fate(outcome: Outcome, *, as_if_finished: bool) -> Fate | None:
    """The fate shared by all tokens of a rollout, or None if each has its own."""
    if outcome.status in (Status.FAILED, Status.LOST):
        return Fate.DROPPED_ROLLOUT_FAILED
    if outcome.status is Status.RUNNING and not as_if_finished:
        return Fate.DROPPED_RUNNING
    return Fate.DROPPED_FILTERED if outcome.filtered is not None else None


def unlinked_fate(turn: Turn) -> Fate | None:
    """The fate of a turn that cannot be part of a branch, or None if it can."""
    if turn.facts.auxiliary is not None:
        return Fate.DROPPED_AUXILIARY
    if TurnFlag.NOT_TOKEN_FAITHFUL in turn.facts.flags:
        return Fate.DROPPED_NOT_FAITHFUL
    return Fate.DROPPED_EMPTY_PROMPT if not len(turn.prompt_tokens) else None


def turn_fate(turn: Turn, is_fault: bool, arrivals: Arrivals, policy: CutPolicy) -> Fate | None:
    """The fate shared by all tokens of a turn, or None if they may train. What later prompts show has arrived.

    `is_fault`: no engine can have sampled it, though the recorder did not state that.
    """
    facts = turn.facts
    if is_fault or facts.is_engine_fault:
        return Fate.MASKED_ENGINE_ERROR
    if turn.sequence in arrivals.unproven and turn.sequence not in arrivals.heads and (doubt := _doubt(turn)):
        return doubt
    if turn.sequence in arrivals.abandoned and not policy.train_abandoned:
        return Fate.MASKED_ABANDONED
    return Fate.MASKED_CONSTRAINED if facts.is_constrained and not policy.train_constrained else None


def _doubt(turn: Turn) -> Fate | None:
    """The fate of the part of a reply that no later turn shows, or None if the reply was delivered in full."""
    if turn.facts.finish is Finish.ABORT:
        return Fate.MASKED_ABORTED
    return Fate.MASKED_UNDELIVERED if turn.facts.delivery is not Delivery.DELIVERED else None


def token_runs(turn: Turn, shared: Fate | None, policy: CutPolicy, staleness: Staleness) -> list[FateRun]:
    """The fates of a turn's tokens: the shared one, or none yet, with single tokens masked."""
    count = len(turn.sampled_ids)
    if shared is None and turn.logprobs is None and not policy.train_without_logprobs:
        shared = Fate.MASKED_NO_LOGPROB
    if shared is not None or not count:
        return [FateRun(0, count, shared)] if count else []
    stale = [one for one in turn.facts.segments if _is_stale(one, policy, staleness)]
    missing = None if turn.logprobs is None or policy.train_without_logprobs else np.isnan(turn.logprobs)
    if not stale and (missing is None or not missing.any()):
        return [FateRun(0, count, None)]
    codes = np.zeros(count, dtype=np.uint8)
    for segment in stale:
        codes[segment.start : segment.stop] = 1
    if missing is not None:
        codes[missing] = 2
    fates = (None, Fate.MASKED_STALE, Fate.MASKED_NO_LOGPROB)
    return [FateRun(start, stop, fates[codes[start]]) for start, stop in equal_runs(codes)]


def _is_stale(segment: Segment, policy: CutPolicy, staleness: Staleness) -> bool:
    if policy.max_staleness is None:
        return False
    age = staleness.of(segment.first_version)
    return age is None or age > policy.max_staleness


def equal_runs(values: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """The ranges `[start, stop)` of equal values in an array, in order."""
    bounds = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    return list(pairwise(bounds)) if len(values) else []
