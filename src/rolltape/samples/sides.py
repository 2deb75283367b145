"""Side arrays, cut and joined along a branch as its tokens are."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rolltape.errors import MisalignedError
from rolltape.records.sample import SampleSide
from rolltape.records.turn import SideArray, Turn


def joined_sides(turns: Sequence[Turn], reach: Sequence[int], length: int) -> dict[str, SampleSide]:
    """Each side array over the sample's tokens. The turn that first held a token speaks for it.

    `reach` says for each turn of the branch how many of its leading ids still stand in the sample.
    """
    parts: dict[str, list[tuple[Turn, SideArray, int]]] = {}
    for turn, limit in zip(turns, reach, strict=True):
        for name, side in turn.side.items():
            parts.setdefault(name, []).append((turn, side, limit))
    return {name: _joined(name, named, length) for name, named in parts.items()}


def _joined(name: str, parts: Sequence[tuple[Turn, SideArray, int]], length: int) -> SampleSide:
    first_turn, first, _ = parts[0]
    for turn, side, _ in parts:
        if _kind(side) != _kind(first):
            raise MisalignedError(
                f"side array {name!r} is {_kind(first)} in turn {first_turn.id} but {_kind(side)} in turn {turn.id}; "
                "give it one kind throughout a session"
            )
    # For each token, the part that speaks for it; later turns first, so that earlier ones overrule them.
    speaker = np.full(length, -1, dtype=np.int32)
    for number, (_, side, reach) in reversed(list(enumerate(parts))):
        speaker[side.start : min(side.stop, reach)] = number
    missing = _runs(speaker == -1)
    if first.counts is None:
        values = np.zeros((length, *first.values.shape[1:]), dtype=first.values.dtype)
        for number, (_, side, _) in enumerate(parts):
            tokens = np.flatnonzero(speaker == number)
            values[tokens] = side.values[tokens - side.start]
        return SampleSide(values, None, missing)
    return _joined_ragged([side for _, side, _ in parts], speaker, missing)


def _joined_ragged(
    sides: Sequence[SideArray], speaker: npt.NDArray[np.int32], missing: tuple[tuple[int, int], ...]
) -> SampleSide:
    counts = np.zeros(len(speaker), dtype=np.int32)
    pieces: list[npt.NDArray[Any]] = []
    offsets = [np.concatenate([[0], np.cumsum(_counts(side))]) for side in sides]
    bounds = [0, *(np.flatnonzero(np.diff(speaker)) + 1).tolist(), len(speaker)]
    for start, stop in pairwise(bounds):
        number = int(speaker[start]) if stop > start else -1
        if number < 0:
            continue
        side, offset = sides[number], offsets[number]
        own = slice(start - side.start, stop - side.start)
        counts[start:stop] = _counts(side)[own]
        pieces.append(side.values[offset[own.start] : offset[own.stop]])
    empty = sides[0].values[:0]
    return SampleSide(np.concatenate(pieces) if pieces else empty, counts, missing)


def _kind(side: SideArray) -> str:
    return f"{side.values.dtype}{list(side.values.shape[1:])}{'' if side.counts is None else ' ragged'}"


def _counts(side: SideArray) -> npt.NDArray[np.int32]:
    """How many values each covered token has."""
    return np.ones(len(side.values), dtype=np.int32) if side.counts is None else side.counts


def _runs(mask: npt.NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return tuple((int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True))
