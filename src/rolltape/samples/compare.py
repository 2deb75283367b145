"""Two cut policies on one rollout: the samples that each makes, and the tokens on which they disagree."""

from collections.abc import Iterator, Sequence

import msgspec

from rolltape.records.policy import CutPolicy
from rolltape.records.rollout import Rollout
from rolltape.records.sample import Fate, Ledger
from rolltape.samples.linearize import Linearized, linearize_under


class FateDifference(msgspec.Struct, frozen=True):
    """Sampled tokens `[start, stop)` of a turn that have different fates under two cut policies."""

    turn: str
    start: int
    stop: int
    left: Fate
    right: Fate


class Comparison(msgspec.Struct, frozen=True, eq=False):
    """One rollout under two cut policies. Each side has its samples and its ledger.

    Example:

        compared = rolltape.compare(rollout, "exact", "slime")
        print(len(compared.left), len(compared.right), len(compared.differences))
    """

    left: Linearized
    right: Linearized
    differences: tuple[FateDifference, ...]  # in the order of the ledger

    @property
    def shared_samples(self) -> tuple[str, ...]:
        """The ids of the samples that both make: they have the same tokens, and the same tokens train."""
        right = {outline.id for outline in self.right.outlines}
        return tuple(outline.id for outline in self.left.outlines if outline.id in right)

    @property
    def trained_only_left(self) -> int:
        """How many tokens train under the left policy alone."""
        return sum(one.stop - one.start for one in self.differences if one.left.trains)

    @property
    def trained_only_right(self) -> int:
        """How many tokens train under the right policy alone."""
        return sum(one.stop - one.start for one in self.differences if one.right.trains)


def compare(
    rollout: Rollout,
    left: CutPolicy | str,
    right: CutPolicy | str,
    *,
    versions: Sequence[str] = (),
    current_version: str | None = None,
    as_if_finished: bool = False,
) -> Comparison:
    """Compare two cut policies on one rollout; its trees and forks are computed once.

    Example:

        compared = rolltape.compare(rollout, "exact", "keep-head")
        print(len(compared.left), len(compared.right), compared.shared_samples)
        for apart in compared.differences:
            print(apart.turn, apart.start, apart.stop, apart.left, apart.right)

    The options are those of `linearize`.
    """
    first, second = linearize_under(
        rollout,
        [left, right],
        versions=versions,
        current_version=current_version,
        as_if_finished=as_if_finished,
    )
    return Comparison(first, second, tuple(_differences(first.ledger, second.ledger)))


def _differences(left: Ledger, right: Ledger) -> Iterator[FateDifference]:
    """Where two ledgers of one rollout differ. Both cover the same turns, in the same order, without a gap."""
    mine, theirs = iter(left.entries), iter(right.entries)
    one, other = next(mine, None), next(theirs, None)
    while one is not None and other is not None:
        start, stop = max(one.start, other.start), min(one.stop, other.stop)
        if one.fate is not other.fate:
            yield FateDifference(one.turn, start, stop, one.fate, other.fate)
        one, other = (
            next(mine, None) if one.stop == stop else one,
            next(theirs, None) if other.stop == stop else other,
        )
