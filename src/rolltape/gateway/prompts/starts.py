"""Where each message begins in the ids that a renderer gave."""

from collections.abc import Sequence

import numpy as np


def message_starts(message_indices: Sequence[int], places: Sequence[int]) -> tuple[int, ...]:
    """The first id of each message; `places` says which of the rendered messages each one became.

    A message that left no ids begins where the next one does. Where a template reorders messages, a start is
    never less than the one before it.
    """
    owners = np.asarray(message_indices, dtype=np.int64)
    count = max(places, default=-1) + 1
    firsts = np.full(count + 1, len(owners), dtype=np.int64)
    positions = np.flatnonzero(owners >= 0)[::-1]
    firsts[owners[positions]] = positions  # of equal owners the last one written counts: the first position
    missing = firsts[:count] == len(owners)
    for index in np.flatnonzero(missing)[::-1]:
        firsts[index] = firsts[index + 1]
    rising = np.maximum.accumulate(firsts[:count]) if count else firsts[:0]
    return tuple(int(rising[place]) for place in places)
