"""Token records back to where their tokens came from, and the tokens in them that stand out."""

import heapq
from collections.abc import Iterable

import msgspec
import numpy as np

from rolltape.errors import RecordError
from rolltape.records.sample import Sample, Span
from rolltape.records.token_record import TokenRecord


class Standout(msgspec.Struct, frozen=True, eq=False):
    """A token of a record, and the value by which it stands out."""

    record: TokenRecord
    at: int
    value: float


def spans_of(record: TokenRecord, sample: Sample) -> tuple[Span, ...]:
    """The sample's spans as far as the record reaches; refused where the trainer saw other ids."""
    length = min(len(record), len(sample.ids))
    differing = np.flatnonzero(record.ids[:length] != sample.ids[:length])
    if len(differing) or len(record) > length:
        at = int(differing[0]) if len(differing) else length
        raise RecordError(
            f"token record {record.place}: departs from sample {sample.id} at token {at} of {len(record)}; "
            "its sample_ids may be those of other sequences"
        )
    within = (span for span in sample.spans if span.start < length)
    return tuple(msgspec.structs.replace(span, stop=min(span.stop, length)) for span in within)


def standouts(records: Iterable[TokenRecord], column: str, count: int) -> list[Standout]:
    """The trained tokens with the largest values of a column, largest first; what is not a number comes before all."""
    found: list[tuple[float, int, int, Standout]] = []  # the smallest first
    for number, record in enumerate(records):
        values = record.columns().get(column)
        if values is None:
            continue
        trained = np.flatnonzero(record.trained_mask)
        keys = values[trained].astype(np.float64)
        keys[np.isnan(keys)] = np.inf
        for place in np.argsort(-keys, kind="stable")[:count].tolist():
            at = int(trained[place])
            # Equal values in the order of the records, so that two looks at a run show the same.
            heapq.heappush(found, (float(keys[place]), -number, -at, Standout(record, at, float(values[at]))))
            if len(found) > count:
                heapq.heappop(found)
    return [standout for *_, standout in sorted(found, key=lambda one: one[:3], reverse=True)]
