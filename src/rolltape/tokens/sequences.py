"""Sequences on the host, cut and ready to be encoded."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

PART_TOKENS = 1 << 19  # a file's worth: enough to compress well, few enough that several threads share a step


class Sequences(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Some sequences of one step: what is said of each, and their columns end to end."""

    lengths: npt.NDArray[np.int64]
    columns: dict[str, Array]
    facts: dict[str, list[Any]]  # micro_step, micro_sequence, sample, …

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def parts(self, most_tokens: int) -> "Iterator[Sequences]":
        """The same in stretches of at most so many tokens, if a sequence is not longer than that."""
        ends = self.lengths.cumsum()
        first, begin = 0, 0
        while first < len(self):
            last = max(int(np.searchsorted(ends, begin + most_tokens, side="right")), first + 1)
            end = int(ends[last - 1])
            yield Sequences(
                lengths=self.lengths[first:last],
                columns={name: values[begin:end] for name, values in self.columns.items()},
                facts={name: values[first:last] for name, values in self.facts.items()},
            )
            first, begin = last, end
