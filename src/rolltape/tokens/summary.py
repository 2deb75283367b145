"""A step's token records in a few figures, over trained tokens alone."""

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rolltape.records.token_record import TokenRecord

QUANTILES = (0.01, 0.5, 0.99)
SUMMARY_COLUMNS = ("mismatch_kl", "ratio", "entropy", "masked", "masked_high", "masked_low")

Values = npt.NDArray[np.float32]

NO_VALUES: Values = np.empty(0, np.float32)


class SequenceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence in figures; None: the column is not there."""

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
    """A step in figures. Means and quantiles leave out numbers that are not finite, which are counted."""

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


class Tally:
    """Numbers as they come. Those that are not finite are seen, and no more."""

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


def summarized(step: int, records: Iterable[TokenRecord], worst: int = 3) -> StepFigures:
    """The figures of a step. Of its tokens only their ratios are held, for the quantiles."""
    sequences: list[SequenceFigures] = []
    tallies = {name: Tally() for name in SUMMARY_COLUMNS}
    held: list[npt.NDArray[Any]] = [NO_VALUES]
    for record in records:
        sequences.append(sequence_figures(record))
        for name, tally in tallies.items():
            tally.add(_trained(record, name))
        held.append(_finite(_trained(record, "ratio")))
    ratios = np.concatenate(held)
    return StepFigures(
        step=step,
        records=len(sequences),
        tokens=sum(one.tokens for one in sequences),
        trained_tokens=sum(one.trained_tokens for one in sequences),
        mismatch_kl=tallies["mismatch_kl"].mean,
        max_mismatch_kl=tallies["mismatch_kl"].largest,
        masked=tallies["masked"].mean,
        masked_high=tallies["masked_high"].mean,
        masked_low=tallies["masked_low"].mean,
        entropy=tallies["entropy"].mean,
        ratio_quantiles=tuple(np.quantile(ratios, QUANTILES).tolist()) if len(ratios) else None,
        not_finite=tallies["ratio"].seen - len(ratios),
        worst=tuple(by_mismatch(sequences)[:worst]),
    )


def by_mismatch(sequences: Iterable[SequenceFigures]) -> list[SequenceFigures]:
    """Sequences with the largest mean mismatch first, where they have one."""
    known = [one for one in sequences if one.mismatch_kl is not None]
    return sorted(known, key=lambda one: -(one.mismatch_kl or 0.0))


def sequence_figures(record: TokenRecord) -> SequenceFigures:
    """The figures of one record."""
    mismatch = Tally(_trained(record, "mismatch_kl"))
    return SequenceFigures(
        place=record.place,
        sample=record.sample,
        env=record.env,
        reward=record.reward,
        tokens=len(record),
        trained_tokens=record.trained_tokens,
        mismatch_kl=mismatch.mean,
        max_mismatch_kl=mismatch.largest,
        masked=Tally(_trained(record, "masked")).mean,
    )


def _trained(record: TokenRecord, column: str) -> Values:
    """A column's values at the trained tokens, flags as 0 and 1; none if it is not there."""
    values = getattr(record, column)
    return NO_VALUES if values is None else values[record.trained_mask].astype(np.float32)


def _finite(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    finite: npt.NDArray[Any] = values[np.isfinite(values)]
    return finite
