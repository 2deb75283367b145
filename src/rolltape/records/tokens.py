"""Token ids that share their beginnings: a turn's prompt is an earlier turn's ids, cut, plus what is new."""

from collections.abc import Iterator
from typing import Self

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]

NO_IDS: Ids = np.empty(0, dtype=np.int32)
NO_IDS.setflags(write=False)


def common_prefix(left: Ids, right: Ids) -> int:
    """How many leading ids two arrays share."""
    limit = min(len(left), len(right))
    differs = left[:limit] != right[:limit]
    first = int(differs.argmax()) if limit else 0
    return first if limit and differs[first] else limit


class TokenChain:
    """An immutable id sequence: `parent[:keep]` followed by `own`. Sharing is storage, not meaning."""

    __slots__ = ("depth", "jump", "jump_keep", "keep", "own", "parent")

    parent: Self | None
    keep: int
    own: Ids
    depth: int

    def __init__(self, own: Ids, parent: Self | None = None, keep: int = 0) -> None:
        # Links that contribute nothing are skipped, so that a chain is as short as its contents allow.
        while parent is not None and keep <= parent.keep:
            parent = parent.parent
        self.parent = parent
        self.keep = keep if parent is not None else 0
        self.own = own
        self.depth = 0 if parent is None else parent.depth + 1
        # Jump pointers in skew-binary steps, with what is kept all the way: distant links meet in logarithmic time.
        self.jump: Self = self
        self.jump_keep = self.keep
        if parent is not None:
            up = parent.jump
            if parent.depth - up.depth == up.depth - up.jump.depth:
                self.jump, self.jump_keep = up.jump, min(self.keep, parent.jump_keep, up.jump_keep)
            else:
                self.jump = parent

    def __len__(self) -> int:
        return self.keep + len(self.own)

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[Ids]:
        """The arrays that make up `[start:stop]`, last one first."""
        limit = len(self) if stop is None else min(stop, len(self))
        link: TokenChain | None = self
        while link is not None and limit > start:
            if limit > link.keep:
                yield link.own[max(start - link.keep, 0) : limit - link.keep]
                limit = link.keep
            link = link.parent

    def slice(self, start: int = 0, stop: int | None = None) -> Ids:
        """The ids `[start:stop]` as one array; costs what it returns plus the links it crosses."""
        pieces = [piece for piece in self.pieces(start, stop) if len(piece)]
        if not pieces:
            return NO_IDS
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces[::-1])

    def to_numpy(self) -> Ids:
        """All ids as one array."""
        return self.slice()

    def common_prefix(self, other: "TokenChain") -> int:
        """How many leading ids two chains share; costs what lies beyond their common links."""
        left, left_cut = self._at_depth(other.depth)
        right, right_cut = other._at_depth(self.depth)
        while left is not right and (left_up := left.parent) is not None and (right_up := right.parent) is not None:
            # Equally deep links have equally deep jumps: jump while that does not pass the place where they meet.
            if left.jump is not right.jump:
                left_cut, right_cut = min(left_cut, left.jump_keep), min(right_cut, right.jump_keep)
                left, right = left.jump, right.jump
            else:
                left_cut, right_cut = min(left_cut, left.keep), min(right_cut, right.keep)
                left, right = left_up, right_up
        if left is not right:
            left_cut = right_cut = 0
        shared, limit = min(left_cut, right_cut), min(len(self), len(other))
        return shared + common_prefix(self.slice(shared, limit), other.slice(shared, limit))

    def _at_depth(self, depth: int) -> tuple["TokenChain", int]:
        """The link at that depth on the way to the start, if this one is deeper, and how much of it is kept here."""
        link: TokenChain = self
        cut = len(self)
        while link.depth > depth and (up := link.parent) is not None:
            if link.jump.depth >= depth:
                link, cut = link.jump, min(cut, link.jump_keep)
            else:
                link, cut = up, min(cut, link.keep)
        return link, cut
