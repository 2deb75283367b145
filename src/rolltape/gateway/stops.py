"""Find stop strings that begin before an interruption and end after it, which no engine sees whole."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from rolltape.gateway.generate import Stretch
from rolltape.records.tokens import Ids
from rolltape.records.turn import Finish, Segment


def cut_at_stop(
    stretches: list[Stretch], prompt: Ids, before: int, stops: Sequence[str], decode: Callable[[Ids], str]
) -> list[Stretch]:
    """The stretches up to the token that completes such a stop string; all of them where there is none.

    The last `before` ids of the prompt are the reply's too, sampled earlier.
    """
    uncut = not before and len(stretches) < 2
    if not stops or uncut or any(stretch.given.message is not None for stretch in stretches):
        return stretches
    window = max(len(stop.encode()) for stop in stops)  # no id is less than a byte
    ids = np.concatenate([prompt, *(stretch.given.ids for stretch in stretches)])
    begun = boundary = len(prompt)
    for at, stretch in enumerate(stretches):
        seen = ids[max(boundary - window, begun - before) : boundary]
        kept = stretch.given.ids[:window]

        def found(count: int, seen: Ids = seen, kept: Ids = kept) -> str | None:
            text = decode(np.concatenate([seen, kept[:count]]))
            return next((stop for stop in stops if stop in text), None)

        if len(seen) and (stop := found(len(kept))):
            count = 1 + bisect_left(range(1, len(kept)), True, key=lambda count: found(count) is not None)
            return [*stretches[:at], _cut(stretch, count, boundary + count, found(count) or stop)]
        boundary += len(stretch.given.ids)
    return stretches


def _cut(stretch: Stretch, count: int, end: int, stop: str) -> Stretch:
    """So many ids of a stretch, which then ends there by that stop string; `end` counts from the prompt's first id."""
    given = stretch.given
    segments = [Segment(one.start, min(one.stop, count), one.first_version, one.last_version) for one in given.segments]
    side: dict[str, Any] = {
        name: {**array, "values": array["values"][: max(end - array["start"], 0)]}
        for name, array in given.side_arrays.items()
    }
    cut = msgspec.structs.replace(
        given,
        ids=given.ids[:count],
        logprobs=None if given.logprobs is None else given.logprobs[:count],
        finish=Finish.STOP_STRING,
        stop_string=stop,
        segments=tuple(one for one in segments if one.start < one.stop),
        side_arrays={name: array for name, array in side.items() if len(array["values"])},
    )
    return stretch._replace(given=cut)
