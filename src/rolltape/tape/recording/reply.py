"""The sampled side of a turn: one reply's ids, logprobs and segments."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from rolltape.errors import MisalignedError, RecordError
from rolltape.records.jsonable import shown
from rolltape.records.turn import NO_IDS, Ids, Logprobs, Segment
from rolltape.tape.recording.arrays import as_ids, as_logprobs
from rolltape.tape.recording.fields import TurnFields, as_items, as_text, as_version

_SEGMENT_FIELDS = {"sampled_ids", "logprobs", "weight_version"}


class Sampled(NamedTuple):
    """What the engine sampled."""

    ids: Ids
    logprobs: Logprobs | None  # None: none given at all
    segments: tuple[Segment, ...]
    had_nan: bool  # a logprob was NaN, which counts as none given


def as_sampled(fields: TurnFields, token_faithful: bool, where: str) -> Sampled:
    """A reply given as one stretch, or as the segments that weight updates cut it into."""
    segments = fields.get("segments")
    if segments is None:
        ids, logprobs, had_nan = _stretch(fields.get("sampled_ids"), fields.get("logprobs"), token_faithful, where)
        version = _versions(fields.get("weight_version"), where)
        return Sampled(ids, logprobs, (Segment(0, len(ids), *version),), had_nan)
    if any(fields.get(name) is not None for name in _SEGMENT_FIELDS):
        raise RecordError(f"{where}: give segments, or sampled_ids with logprobs and weight_version, not both")
    return _joined(segments, token_faithful, where)


def ids_or_none(value: object, token_faithful: bool, where: str) -> Ids:
    """Ids; only a turn whose engine gives none may come without."""
    if value is None and token_faithful:
        raise RecordError(f"{where} is missing; an engine that gives no ids is recorded with token_faithful=False")
    return NO_IDS if value is None else as_ids(value, where)


def _stretch(
    sampled_ids: object, logprobs: object, token_faithful: bool, where: str
) -> tuple[Ids, Logprobs | None, bool]:
    """Ids and their logprobs (None: none given), and whether a NaN was among those."""
    ids = ids_or_none(sampled_ids, token_faithful, f"{where}: sampled_ids")
    if logprobs is None:
        return ids, None, False
    given, had_nan = as_logprobs(logprobs, f"{where}: logprobs")
    if len(given) != len(ids):
        raise MisalignedError(
            f"{where}: {len(ids)} sampled ids but {len(given)} logprobs; ask the engine for logprobs on every token"
        )
    return ids, given, had_nan


def _joined(segments: Iterable[Mapping[str, Any]], token_faithful: bool, where: str) -> Sampled:
    ids: list[Ids] = []
    logprobs: list[Logprobs | None] = []
    parts: list[Segment] = []
    had_nan = False
    for index, segment in enumerate(as_items(segments, f"{where}: segments", "segments")):
        place = f"{where}, segment {index}"
        if not isinstance(segment, Mapping) or segment.keys() - _SEGMENT_FIELDS:
            raise RecordError(f"{place}: a segment has sampled_ids, logprobs and weight_version, not {shown(segment)}")
        own, own_logprobs, nan = _stretch(segment.get("sampled_ids"), segment.get("logprobs"), token_faithful, place)
        had_nan |= nan
        start = parts[-1].stop if parts else 0
        parts.append(Segment(start, start + len(own), *_versions(segment.get("weight_version"), place)))
        ids.append(own)
        logprobs.append(own_logprobs)
    joined_ids = np.concatenate([NO_IDS, *ids])
    joined_ids.setflags(write=False)
    if all(part is None for part in logprobs):
        return Sampled(joined_ids, None, tuple(parts), had_nan)
    joined: Logprobs = np.concatenate(
        [
            np.full(len(own), np.nan, np.float32) if part is None else part
            for own, part in zip(ids, logprobs, strict=True)
        ]
    )
    joined.setflags(write=False)
    return Sampled(joined_ids, joined, tuple(parts), had_nan)


def _versions(value: object, where: str) -> tuple[str | None, str | None]:
    """A weight version, a pair of versions that it lies between, or None where the engine did not say."""
    if value is None or (type(value) is str and value.isascii()):
        return value, value
    first, last = value if isinstance(value, tuple | list) and len(value) == 2 else (value, value)
    where = f"{where}: weight_version"
    return as_text(as_version(first, where), where), as_text(as_version(last, where), where)
