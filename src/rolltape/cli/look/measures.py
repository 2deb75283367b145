"""What tokens can be coloured by: a value for each token of a sample, and on which step of a scale it lies."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rolltape.cli.exits import UsageError
from rolltape.cli.look.by import By
from rolltape.cli.output.screen import number
from rolltape.records.sample import Sample
from rolltape.records.token_record import TokenRecord

Values = npt.NDArray[np.float64]


class Scale(NamedTuple):
    """Limits between the steps of a scale, and what of a value is held against them."""

    limits: tuple[float, ...]
    names: tuple[str, ...]  # of the steps, from the least
    size: Callable[[Values], Values]
    signed: bool = False  # values on either side of a middle are told apart


_HEAT = ("0.05", "0.3", "1", "2.3", "4.6", "7")
SCALES = {
    By.LOGPROB: Scale((0.05, 0.3, 1, 2.3, 4.6, 7), tuple(f"-{one}" for one in _HEAT), lambda values: -values),
    By.PROBABILITY: Scale(
        (0.05, 0.25, 0.63, 0.9, 0.99, 0.999), ("95%", "75%", "37%", "10%", "1%", "0.1%"), lambda values: 1 - values
    ),
    By.ENTROPY: Scale(
        (0.1, 0.4, 0.8, 1.4, 2.2, 3.2), ("0.1", "0.4", "0.8", "1.4", "2.2", "3.2"), lambda values: values
    ),
    By.MISMATCH_KL: Scale(
        (1e-6, 1e-4, 1e-3, 1e-2, 0.1, 1), ("1e-6", "1e-4", "1e-3", "0.01", "0.1", "1"), lambda values: values
    ),
    By.ADVANTAGE: Scale(
        (1e-9, 0.5, 1.5), ("-1.5", "-0.5", "below 0", "above 0", "0.5", "1.5"), lambda values: values, signed=True
    ),
    By.RATIO: Scale((1e-9, 0.1, 0.5), ("0.61", "0.9", "below 1", "above 1", "1.1", "1.65"), np.log, signed=True),
}


class Measured(NamedTuple):
    """A value for each token of a sample, and which tokens have one: what is no number is a value, too."""

    by: By
    values: Values
    present: npt.NDArray[np.bool_]


def measured(sample: Sample, by: By, record: TokenRecord | None) -> Measured:
    """What a sample's tokens are coloured by; of a version its place among the sample's."""
    if by is By.TRAINED:
        return Measured(by, sample.trained_mask.astype(np.float64), sample.sampled_mask)
    if by is By.VERSION:
        return Measured(by, sample.version_index.astype(np.float64), sample.version_index >= 0)
    if by in (By.LOGPROB, By.PROBABILITY):
        logprobs = sample.logprobs.astype(np.float64)
        return Measured(by, logprobs if by is By.LOGPROB else np.exp(logprobs), ~np.isnan(logprobs))
    held = None if record is None or by.column is None else record.columns().get(by.column)
    if record is None or held is None:
        raise _missing(by, sample.id, record)
    record.spans_in(sample)  # refuses a record of other ids
    values, present = np.full(len(sample.ids), np.nan), np.zeros(len(sample.ids), np.bool_)
    values[: len(record)], present[: len(record)] = held, record.trained_mask
    return Measured(by, values, present)


def _missing(by: By, sample: str, record: TokenRecord | None) -> UsageError:
    held = {} if record is None else record.columns()
    there = [one.value for one in By if one.column is None or one.column in held]
    why = (
        f"the run has no token record of sample {sample}, which a trainer writes"
        if record is None
        else f"token record {record.place} of sample {sample} does not have it"
    )
    return UsageError(f"--by {by}: {why}; there are {', '.join(there)}")


def steps_of(given: Measured) -> list[int]:
    """On which step each value lies: 0 for none, else from 1; below the middle of a signed scale from -1 down.

    What is no number lies on the last step.
    """
    scale = SCALES[given.by]
    with np.errstate(divide="ignore", invalid="ignore"):
        sizes = scale.size(given.values)
    steps = np.searchsorted(scale.limits, np.abs(sizes) if scale.signed else sizes, side="right")
    steps = np.where((sizes < 0) & scale.signed, -steps, steps)
    return [int(step) for step in np.where(given.present, steps, 0)]


def value_texts(given: Measured, versions: Sequence[tuple[str, str]]) -> list[str]:
    """Each value for people; nothing where there is none."""
    pairs = zip(given.values.tolist(), given.present.tolist(), strict=True)
    if given.by is By.VERSION:
        return [version_name(*versions[int(value)]) if present else "" for value, present in pairs]
    return [number(value) if present else "" for value, present in pairs]


def version_name(first: str, last: str) -> str:
    """A weight version, or the two between which it lies."""
    return first if first == last else f"{first}..{last}"
