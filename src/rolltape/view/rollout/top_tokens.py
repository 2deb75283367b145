"""The most likely tokens at each place, from an engine's side arrays `top_N_ids` and `top_N_logprobs`."""

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

import numpy as np

from rolltape.records.sample import Sample, SampleSide
from rolltape.records.turn import SideArray, Turn
from rolltape.view.run.rows import Array

_NAMES = re.compile(r"top_(\d+)_ids")
Side = TypeVar("Side", SampleSide, SideArray)
MOST_TOP_TOKENS = 10  # at each place; more would make answers long without use


class TopTokens:
    """A row per token, the most likely first: ids and logprobs; missing entries are -1 and NaN."""

    def __init__(self, length: int) -> None:
        self.ids: Array = np.full((length, 0), -1, np.int32)
        self.logprobs: Array = np.full((length, 0), np.nan, np.float32)

    @property
    def count(self) -> int:
        return int(self.ids.shape[1])

    def put(self, places: Array, ids: Array, logprobs: Array) -> None:
        """Set the rows of these places."""
        count = min(ids.shape[1], MOST_TOP_TOKENS)
        if count > self.count:
            more = ((0, 0), (0, count - self.count))
            self.ids = np.pad(self.ids, more, constant_values=-1)
            self.logprobs = np.pad(self.logprobs, more, constant_values=np.nan)
        self.ids[places, :count] = ids[:, :count]
        self.logprobs[places, :count] = logprobs[:, :count]

    def hide(self, places: Array) -> None:
        """Clear the rows of these places."""
        self.ids[places] = -1
        self.logprobs[places] = np.nan


def sample_top_tokens(sample: Sample) -> TopTokens:
    found = TopTokens(len(sample.ids))
    for ids, logprobs in _pairs(sample.side):
        there: Array = np.ones(len(sample.ids), np.bool_)
        for start, stop in (*ids.missing, *logprobs.missing):
            there[start:stop] = False
        found.put(np.flatnonzero(there), ids.values[there], logprobs.values[there])
    return found


def turn_top_tokens(length: int, turns: Iterable[tuple[Turn, int, int]]) -> TopTokens:
    """The top tokens over the ids of a turn; each of `turns` accounts for `[start, stop)`."""
    found = TopTokens(length)
    for turn, start, stop in turns:
        for ids, logprobs in _pairs(turn.side):
            first, end = max(start, ids.start, logprobs.start), min(stop, ids.stop, logprobs.stop)
            if first < end:
                rows = [one.values[first - one.start : end - one.start] for one in (ids, logprobs)]
                found.put(np.arange(first, end), *rows)
    return found


def _pairs(side: Mapping[str, Side]) -> list[tuple[Side, Side]]:
    """The arrays of ids, each with the array of logprobs; the longest rows first."""
    found: list[tuple[int, tuple[Side, Side]]] = []
    for name, ids in side.items():
        match = _NAMES.fullmatch(name)
        count = 0 if match is None else int(match[1])
        logprobs = side.get(f"top_{count}_logprobs")
        if logprobs is not None and _is_table(ids, count) and _is_table(logprobs, count):
            found.append((count, (ids, logprobs)))
    return [pair for _, pair in sorted(found, key=lambda one: -one[0])]


def _is_table(side: SampleSide | SideArray, count: int) -> bool:
    """Whether an array has the form of Rolltape's engines; a caller may use the name for something else."""
    return side.counts is None and side.values.ndim == 2 and side.values.shape[1] == count
