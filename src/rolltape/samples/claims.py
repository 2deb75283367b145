"""A session's tree → its drafts, and who trains which token: each at most once, decided after branches are cut."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rolltape.records.policy import CutPolicy
from rolltape.records.sample import Fate
from rolltape.records.turn import Finish
from rolltape.samples.branches import Link, branching, chosen_leaves
from rolltape.samples.fates import Run, Staleness, token_runs, turn_fate, unlinked_fate
from rolltape.tree import Arrivals, Tree


class Cut(NamedTuple):
    """A session cut into drafts, and who trains which of its tokens."""

    claims: "Claims"
    drafts: "list[Draft]"


def cut(tree: Tree, arrivals: Arrivals, whole_fate: Fate | None, policy: CutPolicy, staleness: Staleness) -> Cut:
    """Decide which tokens may train, link the turns, choose the branches, and let each claim its tokens."""
    unlinked = {placed.sequence: fate for placed in tree.turns if (fate := unlinked_fate(placed.turn)) is not None}
    branches = branching(tree, unlinked.keys(), policy)
    runs: dict[int, list[Run]] = {}
    for placed in tree.turns:
        shared = whole_fate or unlinked.get(placed.sequence) or turn_fate(placed.turn, arrivals, policy)
        shared = shared or (Fate.MASKED_REWRITTEN if placed.sequence in branches.rewritten else None)
        runs[placed.sequence] = token_runs(placed.turn, shared, policy, staleness)
    claims = Claims(runs, policy)
    ends = branches.ends(claims.may_train)
    return Cut(claims, claims.along(chosen_leaves(branches, claims.may_train, ends, policy), ends))


@dataclass(slots=True, eq=False)
class Draft:
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

    def __init__(self, runs: dict[int, list[Run]], policy: CutPolicy) -> None:
        self.runs = runs  # by sequence number
        self.may_train = {sequence for sequence, own in runs.items() if any(run.fate is None for run in own)}
        self._policy = policy
        self._drafts: dict[int, Draft] = {}  # by the sequence number of their last turn
        self._ends: Mapping[int, Link | None] = {}  # the nearest turn that may train, at or above each
        self._reached: dict[int, int] = {}  # up to which of a turn's ids, and of those above, nothing is left to claim
        self._first_branch: dict[int, int] = {}  # slime: the branch that reached a turn first
        self._out_of_reach: dict[int, Fate] = {}  # why the first draft that holds a turn cannot train all of it
        self._visited: set[int] = set()

    def along(self, leaves: Iterable[Link], ends: Mapping[int, Link | None]) -> list[Draft]:
        """The drafts that train something, in the order of their last turns."""
        self._ends = ends
        if self._policy.claim_before_cut:
            self._claim_by_branch(leaves)
        else:
            self._claim_by_leaf(leaves)
        self._settle_what_is_left()
        return [draft for _, draft in sorted(self._drafts.items()) if draft.trained_tokens]

    def _claim_by_leaf(self, leaves: Iterable[Link]) -> None:
        """Leaves first, then the ends inside of branches, later ones first: a draft comes after all that contain it."""
        inner: dict[int, Link] = {}
        for leaf in leaves:
            self._claim(leaf, 0, inner)
        for sequence in reversed(self.runs):
            if sequence in inner:
                self._claim(inner[sequence], 0, inner)

    def _claim_by_branch(self, leaves: Iterable[Link]) -> None:
        """One branch after the other, each with all the drafts that it is cut into, as slime does."""
        for branch, leaf in enumerate(leaves):
            waiting = {leaf.turn.sequence: leaf}
            while waiting:
                self._claim(waiting.pop(max(waiting)), branch, waiting)

    def _claim(self, end: Link, branch: int, inner: dict[int, Link]) -> None:
        """Claim what a draft may train, from its end upwards; the ends of other drafts that it passes go to `inner`."""
        if end.turn.sequence in self._drafts:
            return
        whole, most = len(end.turn.tokens), self._policy.max_sample_tokens
        length = whole if most is None else min(whole, most)
        draft = self._drafts[end.turn.sequence] = Draft(end, len(self._drafts), length)
        link: Link | None = end
        limit, replaced = draft.length, False
        while link is not None and self._reached.get(link.turn.sequence, -1) < limit:
            self._reached[link.turn.sequence] = limit
            self._claim_turn(draft, link, branch, limit, replaced)
            before = link.before
            other = self._ends[before.turn.sequence] if before and before is not link.continues else None
            if other is not None:
                inner[other.turn.sequence] = other
            step, link = link.step, link.continues
            replaced = step is not None and step.replaces_reply
            if step is not None and link is not None:
                limit = min(limit, len(link.turn.prompt_tokens) if replaced else step.kept)

    def _claim_turn(self, draft: Draft, link: Link, branch: int, limit: int, replaced: bool) -> None:
        sequence, start, count = link.turn.sequence, len(link.turn.prompt_tokens), len(link.turn.sampled_ids)
        self._visited.add(sequence)
        reach = min(max(limit - start, 0), count)
        if self._policy.claim_before_cut and self._first_branch.setdefault(sequence, branch) != branch:
            claimed = Run(0, reach, Fate.MASKED_TRAINED_IN_OTHER_SAMPLE)
        else:
            claimed = Run(0, reach, Fate.TRAINED, draft.number)
        runs = self.runs[sequence] = list(_with_claim(self.runs[sequence], claimed))
        draft.trained_tokens += sum(run.stop - run.start for run in runs if run.draft == draft.number)
        if reach < count:
            beyond = Fate.MASKED_REPLACED if replaced else Fate.MASKED_REWRITTEN_AFTER
            cut = draft.length < len(draft.end.turn.tokens) and start + reach >= draft.length
            self._out_of_reach.setdefault(sequence, Fate.DROPPED_LENGTH if cut and not replaced else beyond)

    def _settle_what_is_left(self) -> None:
        """Give the tokens that no draft claimed their reason. One without a reason has no fate: a gap."""
        for sequence, runs in self.runs.items():
            reason = self._out_of_reach.get(sequence) if sequence in self._visited else Fate.DROPPED_BRANCH
            self.runs[sequence] = [run if run.fate else run._replace(fate=reason) for run in runs]


def _with_claim(runs: Iterable[Run], claimed: Run) -> Iterator[Run]:
    """A reply's runs after what nobody had yet of its beginning was claimed."""
    for run in runs:
        if run.fate is not None or run.start >= claimed.stop:
            yield run
            continue
        yield claimed._replace(start=run.start, stop=min(run.stop, claimed.stop))
        if claimed.stop < run.stop:
            yield run._replace(start=claimed.stop)
