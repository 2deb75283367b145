"""A step's token records in a few figures, over trained tokens alone."""

from collections.abc import Iterable

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


def summarized(step: int, records: Iterable[TokenRecord], worst: int = 3) -> StepFigures:
    """The figures of a step."""
    sequences: list[SequenceFigures] = []
    trained: dict[str, list[Values]] = {name: [] for name in SUMMARY_COLUMNS}
    for record in records:
        sequences.append(sequence_figures(record))
        for name, held in trained.items():
            held.append(_trained(record, name))
    joined = {name: np.concatenate([NO_VALUES, *held]) for name, held in trained.items()}
    ratios = joined["ratio"][np.isfinite(joined["ratio"])]
    return StepFigures(
        step=step,
        records=len(sequences),
        tokens=sum(one.tokens for one in sequences),
        trained_tokens=sum(one.trained_tokens for one in sequences),
        mismatch_kl=_mean(joined["mismatch_kl"]),
        max_mismatch_kl=_max(joined["mismatch_kl"]),
        masked=_mean(joined["masked"]),
        masked_high=_mean(joined["masked_high"]),
        masked_low=_mean(joined["masked_low"]),
        entropy=_mean(joined["entropy"]),
        ratio_quantiles=tuple(np.quantile(ratios, QUANTILES).tolist()) if len(ratios) else None,
        not_finite=len(joined["ratio"]) - len(ratios),
        worst=tuple(by_mismatch(sequences)[:worst]),
    )


def by_mismatch(sequences: Iterable[SequenceFigures]) -> list[SequenceFigures]:
    """Sequences with the largest mean mismatch first, where they have one."""
    known = [one for one in sequences if one.mismatch_kl is not None]
    return sorted(known, key=lambda one: -(one.mismatch_kl or 0.0))


def sequence_figures(record: TokenRecord) -> SequenceFigures:
    """The figures of one record."""
    mismatch = _trained(record, "mismatch_kl")
    return SequenceFigures(
        place=record.place,
        sample=record.sample,
        env=record.env,
        reward=record.reward,
        tokens=len(record),
        trained_tokens=record.trained_tokens,
        mismatch_kl=_mean(mismatch),
        max_mismatch_kl=_max(mismatch),
        masked=_mean(_trained(record, "masked")),
    )


def _trained(record: TokenRecord, column: str) -> Values:
    """A column's values at the trained tokens, flags as 0 and 1; none if it is not there."""
    values = record.columns().get(column)
    return NO_VALUES if values is None else values[record.trained_mask].astype(np.float32)


def _mean(values: Values) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean(dtype=np.float64)) if len(finite) else None


def _max(values: Values) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.max()) if len(finite) else None
