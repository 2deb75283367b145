"""The side array of routed experts, where it is whole enough to replay a router from."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rolltape.records.sample import Sample

ROUTED_EXPERTS = "routed_experts"

# [token, layer, expert]: a row for every token that was fed, which is all but the last.
Experts = npt.NDArray[np.int32]


def routed_experts(sample: Sample) -> Experts | None:
    """One row a token but the last; None: not recorded, rows are flat, or a token that was fed has none."""
    side = sample.side.get(ROUTED_EXPERTS)
    if side is None or side.counts is not None or side.values.ndim != 3 or side.values.dtype.kind not in "iu":
        return None
    fed = len(sample.ids) - 1
    if any(start < fed for start, _ in side.missing):
        return None
    return side.values[:fed].astype(np.int32)


def all_routed_experts(samples: Sequence[Sample]) -> list[Experts] | None:
    """Those of every sample; None: one has none, or they are of different shapes, so that none can be used."""
    found = [experts for experts in map(routed_experts, samples) if experts is not None]
    if not found or len(found) < len(samples) or len({experts.shape[1:] for experts in found}) > 1:
        return None
    return found
