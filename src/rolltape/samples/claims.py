"""Who trains which token: decided after branches are chosen and cut, each token at most once."""

from collections import deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from rolltape.records.ledger import Fate
from rolltape.records.policy import CutPolicy
from rolltape.samples.branches import Link
from rolltape.samples.fates import CODE_OF, PENDING, Fates

NOBODY = -1


class Draft:
    """A sample before its arrays are made: it ends with `end`, and its ids are that turn's."""

    __slots__ = ("end", "length", "number", "trained_tokens")

    def __init__(self, end: Link, number: int, max_tokens: int | None) -> None:
        self.end = end
        self.number = number
        self.length = len(end.turn.tokens) if max_tokens is None else min(len(end.turn.tokens), max_tokens)
        self.trained_tokens = 0


class Claims:
    """One session's tokens: the fate of each and the draft that trains it."""

    def __init__(self, fates: dict[int, Fates], policy: CutPolicy) -> None:
        self.fates = fates  # by sequence number
        self.owner: dict[int, npt.NDArray[np.int32]] = {
            sequence: np.full(len(codes), NOBODY, dtype=np.int32) for sequence, codes in fates.items()
        }
        self._policy = policy
        self._settled: set[int] = set()  # turns from which on upwards nothing is left to claim
        self._first_branch: dict[int, int] = {}  # slime: the branch that reached a turn first
        self._out_of_reach: dict[int, Fate] = {}  # why the first draft that holds a turn cannot train all of it
        self._visited: set[int] = set()

    def along(self, leaves: Iterable[Link]) -> list[Draft]:
        """The drafts that train something, in the order of their last turns."""
        drafts: list[Draft] = []
        ends: set[int] = set()
        waiting = deque(enumerate(leaves))
        while waiting:
            branch, end = waiting.popleft()
            if end.turn.sequence in ends:
                continue
            ends.add(end.turn.sequence)
            drafts.append(Draft(end, len(drafts), self._policy.max_sample_tokens))
            before = self._claim(drafts[-1], branch)
            if before is None:
                continue
            if self._policy.claim_before_cut:
                waiting.appendleft((branch, before))
            else:
                # What ends inside a branch comes last: another branch may go on from there, and train it as well.
                waiting.append((branch, before))
        self._settle_what_is_left()
        return sorted((draft for draft in drafts if draft.trained_tokens), key=lambda draft: draft.end.turn.sequence)

    def _claim(self, draft: Draft, branch: int) -> Link | None:
        """Claim what a draft may train, from its end upwards; gives the end of the draft before it on the branch."""
        walked: list[Link] = []
        link, limit, replaced = draft.end, draft.length, False
        while True:
            if link.turn.sequence in self._settled:
                before = None
                break
            self._claim_turn(draft, link, branch, limit, replaced)
            walked.append(link)
            if link.continues is None or link.step is None:
                before = link.before
                break
            limit, replaced = min(limit, link.step.kept), link.step.replaces_reply
            link = link.continues
        for passed in reversed(walked):
            above = passed.continues
            if PENDING in self.fates[passed.turn.sequence] or (above and above.turn.sequence not in self._settled):
                break
            self._settled.add(passed.turn.sequence)
        return before

    def _claim_turn(self, draft: Draft, link: Link, branch: int, limit: int, replaced: bool) -> None:
        sequence, start = link.turn.sequence, len(link.turn.prompt_tokens)
        self._visited.add(sequence)
        codes = self.fates[sequence]
        reach = 0 if replaced else min(max(limit - start, 0), len(codes))
        claimable = np.flatnonzero(codes[:reach] == PENDING)
        if self._policy.claim_before_cut and self._first_branch.setdefault(sequence, branch) != branch:
            codes[claimable] = CODE_OF[Fate.MASKED_LOST_CLAIM]
        else:
            codes[claimable] = CODE_OF[Fate.TRAINED]
            self.owner[sequence][claimable] = draft.number
            draft.trained_tokens += len(claimable)
        if reach < len(codes):
            beyond = Fate.MASKED_REPLACED if replaced else Fate.MASKED_GIVEN_UP
            cut = draft.length < len(draft.end.turn.tokens) and start + reach >= draft.length
            self._out_of_reach.setdefault(sequence, Fate.DROPPED_LENGTH if cut and not replaced else beyond)

    def _settle_what_is_left(self) -> None:
        """Give the tokens that no draft claimed their reason. One without a reason stays PENDING: a gap."""
        for sequence, codes in self.fates.items():
            reason = self._out_of_reach.get(sequence) if sequence in self._visited else Fate.DROPPED_BRANCH
            if reason is not None:
                codes[codes == PENDING] = CODE_OF[reason]
