"""A sample's per-token columns with the values that other frameworks put where there is none."""

import numpy as np
import numpy.typing as npt

from rolltape.records.sample import Sample
from rolltape.records.turn import Logprobs


def logprobs_or_zero(sample: Sample) -> Logprobs:
    """The logprob of each trained token, bit for bit, and 0 on all others."""
    values: Logprobs = np.zeros_like(sample.logprobs)
    values[sample.trained_mask] = sample.logprobs[sample.trained_mask]
    return values


def advantages_or_zero(sample: Sample) -> npt.NDArray[np.float32]:
    """The sample's advantage on each trained token, and 0 on all others."""
    return np.where(sample.trained_mask, np.float32(sample.advantage or 0.0), np.float32(0))
