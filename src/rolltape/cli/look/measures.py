"""What tokens are colored by: a value for each token of a sample, and its step on a scale."""

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rolltape.cli.output.screen import number
from rolltape.errors import UsageError
from rolltape.records.sample import Sample
from rolltape.records.token_record import TokenRecord

Values = npt.NDArray[np.float64]


class Measure(enum.StrEnum):
    """What tokens can be colored by."""

    TRAINED = "trained"  # whether the token trains
    LOGPROB = "logprob"  # as the engine returned it
    PROBABILITY = "probability"
    VERSION = "version"  # of the weights that sampled it
    # From a trainer's token records:
    ENTROPY = "entropy"
    ADVANTAGE = "advantage"
    RATIO = "ratio"
    MISMATCH_KL = "mismatch_kl"

    @property
    def column(self) -> str | None:
        """The column of a token record with the values, or None if the sample itself has them."""
        columns = {
            Measure.ENTROPY: "entropy",
            Measure.ADVANTAGE: "advantages",
            Measure.RATIO: "ratio",
            Measure.MISMATCH_KL: "mismatch_kl",
        }
        return columns.get(self)


class Scale(NamedTuple):
    """The limits between a scale's steps, and how a value is compared with them."""

    limits: tuple[float, ...]
    names: tuple[str, ...]  # of the steps, from the least
    size: Callable[[Values], Values]
    signed: bool = False  # steps on both sides of a middle


_HEAT = ("0.05", "0.3", "1", "2.3", "4.6", "7")
SCALES = {
    Measure.LOGPROB: Scale((0.05, 0.3, 1, 2.3, 4.6, 7), tuple(f"-{one}" for one in _HEAT), lambda values: -values),
    Measure.PROBABILITY: Scale(
        (0.05, 0.25, 0.63, 0.9, 0.99, 0.999), ("95%", "75%", "37%", "10%", "1%", "0.1%"), lambda values: 1 - values
    ),
    Measure.ENTROPY: Scale(
        (0.1, 0.4, 0.8, 1.4, 2.2, 3.2), ("0.1", "0.4", "0.8", "1.4", "2.2", "3.2"), lambda values: values
    ),
    Measure.MISMATCH_KL: Scale(
        (1e-6, 1e-4, 1e-3, 1e-2, 0.1, 1), ("1e-6", "1e-4", "1e-3", "0.01", "0.1", "1"), lambda values: values
    ),
    Measure.ADVANTAGE: Scale(
        (1e-9, 0.5, 1.5), ("-1.5", "-0.5", "below 0", "above 0", "0.5", "1.5"), lambda values: values, signed=True
    ),
    Measure.RATIO: Scale((1e-9, 0.1, 0.5), ("0.61", "0.9", "below 1", "above 1", "1.1", "1.65"), np.log, signed=True),
}


class MeasuredTokens(NamedTuple):
    """A value for each token of a sample, and which tokens have one. NaN is a value."""

    by: Measure
    values: Values
    present: npt.NDArray[np.bool_]


def measure_tokens(sample: Sample, by: Measure, record: TokenRecord | None) -> MeasuredTokens:
    """The values of a sample's tokens; a version is its position among the sample's versions."""
    if by is Measure.TRAINED:
        return MeasuredTokens(by, sample.trained_mask.astype(np.float64), sample.sampled_mask)
    if by is Measure.VERSION:
        return MeasuredTokens(by, sample.version_index.astype(np.float64), sample.version_index >= 0)
    if by in (Measure.LOGPROB, Measure.PROBABILITY):
        logprobs = sample.logprobs.astype(np.float64)
        return MeasuredTokens(by, logprobs if by is Measure.LOGPROB else np.exp(logprobs), ~np.isnan(logprobs))
    held = None if record is None or by.column is None else record.columns().get(by.column)
    if record is None or held is None:
        raise _missing(by, sample.id, record)
    record.spans_in(sample)  # raises if the record holds other ids
    values, present = np.full(len(sample.ids), np.nan), np.zeros(len(sample.ids), np.bool_)
    values[: len(record)], present[: len(record)] = held, record.trained_mask
    return MeasuredTokens(by, values, present)


def _missing(by: Measure, sample: str, record: TokenRecord | None) -> UsageError:
    held = {} if record is None else record.columns()
    there = [one.value for one in Measure if one.column is None or one.column in held]
    why = (
        f"the run has no token record of sample {sample}; a trainer writes them"
        if record is None
        else f"token record {record.place} of sample {sample} lacks it"
    )
    return UsageError(f"--color-by {by}: {why}; available: {', '.join(there)}")


def steps_of(given: MeasuredTokens) -> list[int]:
    """The step of each value: 0 for none, else from 1; below the middle of a signed scale from -1 down.

    NaN is on the last step.
    """
    scale = SCALES[given.by]
    with np.errstate(divide="ignore", invalid="ignore"):
        sizes = scale.size(given.values)
    steps = np.searchsorted(scale.limits, np.abs(sizes) if scale.signed else sizes, side="right")
    steps = np.where((sizes < 0) & scale.signed, -steps, steps)
    return [int(step) for step in np.where(given.present, steps, 0)]


def value_texts(given: MeasuredTokens, versions: Sequence[tuple[str, str]]) -> list[str]:
    """Each value as text, or nothing where there is none."""
    pairs = zip(given.values.tolist(), given.present.tolist(), strict=True)
    if given.by is Measure.VERSION:
        return [version_name(*versions[int(value)]) if present else "" for value, present in pairs]
    return [number(value) if present else "" for value, present in pairs]


def version_name(first: str, last: str) -> str:
    """A weight version, or the first and last one of a range."""
    return first if first == last else f"{first}..{last}"
