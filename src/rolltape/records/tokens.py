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

    __slots__ = ("depth", "keep", "own", "parent")

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
        left, left_cut = self, len(self)
        right, right_cut = other, len(other)
        # A deeper link is never an ancestor of a shallower one, so stepping up the deeper side finds the meeting point.
        while left is not right:
            if left.depth >= right.depth and left.parent is not None:
                left_cut = min(left_cut, left.keep)
                left = left.parent
            elif right.parent is not None:
                right_cut = min(right_cut, right.keep)
                right = right.parent
            else:
                left_cut = right_cut = 0
                break
        shared = min(left_cut, right_cut)
        return shared + common_prefix(self.slice(shared), other.slice(shared))
