"""Which problems may be trained on: a hash of the problem decides, so the two sides can never meet."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from random import Random
from typing import Protocol, TypeVar
from zlib import crc32


class Problem(Protocol):
    """Anything with a key; equal problems (3 + 5 and 5 + 3) have equal keys."""

    def key(self) -> tuple[object, ...]: ...


P = TypeVar("P", bound=Problem)


class Split(Enum):
    """The two sides of every skill."""

    TRAIN = "train"
    HELD_OUT = "held out"


def side_of(*key: object) -> Split:
    """One problem in ten is held out."""
    return Split.HELD_OUT if crc32(repr(key).encode()) % 10 == 7 else Split.TRAIN


def draw(rng: Random, split: Split, make: Callable[[Random], P]) -> P:
    """The first problem that `make` gives on the wanted side."""
    while True:
        problem = make(rng)
        if side_of(*problem.key()) is split:
            return problem
