"""Summarizes a step's token records in figures over its trained tokens, and finds the tokens that stand out."""

import heapq
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.records.token_record import TokenRecord

QUANTILES = (0.01, 0.5, 0.99)
_MEANS = ("mismatch_kl", "entropy", "masked", "masked_high", "masked_low")
SUMMARY_COLUMNS = ("ratio", *_MEANS)

Values = npt.NDArray[np.float32]

NO_VALUES: Values = np.empty(0, np.float32)


class SequenceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one sequence, each None if the record does not have the column."""

    place: str
    sample: str | None
    env: str | None
    reward: float | None
    tokens: int
    trained_tokens: int
    mismatch_kl: float | None  # mean
    max_mismatch_kl: float | None
    masked: float | None  # share of the trained tokens


class StepFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a step. Means and quantiles leave out numbers that are not finite; these are counted."""

    step: int
    records: int
    tokens: int
    trained_tokens: int
    mismatch_kl: float | None
    max_mismatch_kl: float | None
    masked: float | None  # shares of the trained tokens
    masked_high: float | None
    masked_low: float | None
    entropy: float | None
    ratio_quantiles: tuple[float, ...] | None  # at QUANTILES
    not_finite: int  # trained tokens whose ratio is not a finite number
    worst: tuple[SequenceFigures, ...]  # by mean mismatch KL


class TokenOutlier(msgspec.Struct, frozen=True, eq=False):
    """A token of a record, and its value in a column."""

    record: TokenRecord
    at: int
    value: float


class ColumnStats:
    """Mean and maximum of numbers that are added in batches. Numbers that are not finite are only counted."""

    def __init__(self, values: npt.NDArray[Any] = NO_VALUES) -> None:
        self.seen = 0
        self.finite = 0
        self.total = 0.0
        self.largest: float | None = None
        self.add(values)

    def add(self, values: npt.NDArray[Any]) -> None:
        finite = _finite(values)
        self.seen += len(values)
        self.finite += len(finite)
        self.total += float(finite.sum(dtype=np.float64))
        if len(finite) and not (self.largest is not None and self.largest > finite.max()):
            self.largest = float(finite.max())

    @property
    def mean(self) -> float | None:
        return self.total / self.finite if self.finite else None


def summarize_step(step: int, records: Iterable[TokenRecord], worst: int = 3) -> StepFigures:
    """Compute the figures of a step. Only the ratios of its tokens are held in memory, for the quantiles."""
    sequences: list[SequenceFigures] = []
    stats = {name: ColumnStats() for name in SUMMARY_COLUMNS}
    held: list[npt.NDArray[Any]] = [NO_VALUES]
    for record in records:
        sequences.append(sequence_figures(record))
        for name, column in stats.items():
            column.add(_trained(record, name))
        held.append(_finite(_trained(record, "ratio")))
    ratios = np.concatenate(held)
    compared = [one for one in sequences if one.mismatch_kl is not None]
    return StepFigures(
        step=step,
        records=len(sequences),
        tokens=sum(one.tokens for one in sequences),
        trained_tokens=sum(one.trained_tokens for one in sequences),
        max_mismatch_kl=stats["mismatch_kl"].largest,
        **{name: stats[name].mean for name in _MEANS},
        ratio_quantiles=tuple(np.quantile(ratios, QUANTILES).tolist()) if len(ratios) else None,
        not_finite=stats["ratio"].seen - len(ratios),
        worst=tuple(sorted(compared, key=lambda one: -(one.mismatch_kl or 0.0))[:worst]),
    )


def sequence_figures(record: TokenRecord) -> SequenceFigures:
    mismatch = ColumnStats(_trained(record, "mismatch_kl"))
    return SequenceFigures(
        place=record.place,
        sample=record.sample,
        env=record.env,
        reward=record.reward,
        tokens=len(record),
        trained_tokens=record.trained_tokens,
        mismatch_kl=mismatch.mean,
        max_mismatch_kl=mismatch.largest,
        masked=ColumnStats(_trained(record, "masked")).mean,
    )


def largest_tokens(records: Iterable[TokenRecord], column: str, count: int) -> list[TokenOutlier]:
    """The trained tokens with the largest values of a column, largest first. NaN comes first."""
    found: list[tuple[float, int, int, TokenOutlier]] = []  # a heap, the smallest first
    for number, record in enumerate(records):
        values = record.columns().get(column)
        if values is None:
            continue
        trained = np.flatnonzero(record.trained_mask)
        keys = values[trained].astype(np.float64)
        keys[np.isnan(keys)] = np.inf
        for place in np.argsort(-keys, kind="stable")[:count].tolist():
            at = int(trained[place])
            # Equal values are in the order of the records, so that the result is always the same.
            heapq.heappush(found, (float(keys[place]), -number, -at, TokenOutlier(record, at, float(values[at]))))
            if len(found) > count:
                heapq.heappop(found)
    return [outlier for *_, outlier in sorted(found, key=lambda one: one[:3], reverse=True)]


def _trained(record: TokenRecord, column: str) -> Values:
    """A column's values at the trained tokens, flags as 0 and 1; empty if the record does not have it."""
    values = getattr(record, column)
    return NO_VALUES if values is None else values[record.trained_mask].astype(np.float32)


def _finite(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    finite: npt.NDArray[Any] = values[np.isfinite(values)]
    return finite
